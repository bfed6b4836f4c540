"""Compiling for a GPU that is not there: JAX's CUDA plugin needs a description of the chip, no driver."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.aot import no_compilation_cache


class Chip(NamedTuple):
    """What the compiler is told of a chip.

    Its name, compute capability (major), multiprocessors, bytes of cache and of memory, bytes/s of memory.
    """

    name: str
    capability: int
    multiprocessors: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: int


GPU_CHIPS = {
    "h100": Chip("NVIDIA H100 80GB HBM3", 9, 132, 50 << 20, 80 << 30, 3_350_000_000_000),
    "h200": Chip("NVIDIA H200", 9, 132, 50 << 20, 141 << 30, 4_800_000_000_000),
    "b200": Chip("NVIDIA B200", 10, 148, 126 << 20, 180 << 30, 8_000_000_000_000),
}
_CUDA_MAJOR = 13
_DESCRIPTION = """
gpu_device_info {{
  cuda_compute_capability {{ major: {chip.capability} }}
  core_count: {chip.multiprocessors}
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  clock_rate_ghz: 1.9
  l2_cache_size: {chip.l2_bytes}
  device_memory_size: {chip.memory_bytes}
  memory_bandwidth: {chip.bandwidth}
}}
platform_name: "CUDA"
device_description_str: "{chip.name}"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: {cuda} }}
"""


class KernelResources(NamedTuple):
    """What the assembler says of a kernel: its target, registers a thread, bytes spilled, shared memory."""

    target: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


class GpuCompiled(NamedTuple):
    """The compiled function and its Mosaic kernels in the order of compilation.

    There are none where no assembler (`ptxas`, of the package nvidia-cuda-nvcc) was found to ask.
    """

    compiled: jax.stages.Compiled
    kernels: list[KernelResources]


@cache
def gpu_mesh(chip: str) -> Mesh:
    """A mesh of one described device of `chip`.

    Raises ValueError for an unknown chip, RuntimeError where JAX's CUDA plugin is not installed.
    """
    if chip not in GPU_CHIPS:
        raise ValueError(f"unknown chip {chip!r}, known: {', '.join(GPU_CHIPS)}")
    description = _DESCRIPTION.format(chip=GPU_CHIPS[chip], cuda=_CUDA_MAJOR)
    try:
        described = topologies.get_topology_desc(
            "", platform="cuda", target_config=description, topology="1x1x1"
        )
    except (RuntimeError, NotImplementedError) as error:
        raise RuntimeError(
            f"compiling for {chip} needs JAX's CUDA plugin: "
            f"pip install jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}"
        ) from error
    return Mesh(described.devices, ("device",))


def compile_for_gpu(
    function: Callable[..., Any], arguments: Sequence[Any], *, chip: str, donate: int | None = None
) -> GpuCompiled:
    """`function` compiled for one device of `chip` ("h100", "h200", "b200").

    `arguments` are pytrees of arrays or `jax.ShapeDtypeStruct`; `donate` is the index of a donated one.
    Mosaic keeps what it compiled under names that lack the chip: compile for one chip a process. Raises as
    `gpu_mesh`, and whatever the compiler raises.
    """
    mesh = gpu_mesh(chip)
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tuple(arguments)
    )
    jitted = jax.jit(function, donate_argnums=() if donate is None else (donate,))
    with jax.set_mesh(mesh), no_compilation_cache(), _dumped() as folder:
        compiled = jitted.lower(*placed).compile()
        return GpuCompiled(compiled, _resources(folder))


@contextmanager
def _dumped() -> Iterator[Path]:
    """A folder into which Mosaic puts what it compiles meanwhile."""
    before = os.environ.get("MOSAIC_GPU_DUMP_TO")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
            if before is not None:
                os.environ["MOSAIC_GPU_DUMP_TO"] = before


def _resources(folder: Path) -> list[KernelResources]:
    """What the assembler says of each kernel, and the shared memory that its launch asks for."""
    assembler = _find_assembler()
    if assembler is None:
        return []
    found = []
    for code in sorted(folder.glob("*.ptx"), key=lambda path: path.stat().st_mtime_ns):
        target = re.search(r"^\.target\s+(\w+)", code.read_text(), re.MULTILINE)
        if target is None:
            continue
        command = [str(assembler), "-v", f"-arch={target[1]}", str(code), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        registers = re.search(r"Used (\d+) registers", said)
        if registers is None:
            raise RuntimeError(f"{assembler} did not name the registers of a kernel: {said[:200]}")
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said)))
        lowered = code.with_suffix(".mlir-passes.log").read_text(errors="replace")
        shared = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", lowered)
        found.append(KernelResources(target[1], int(registers[1]), spilled, max(map(int, shared), default=0)))
    return found


def _find_assembler() -> Path | None:
    """`ptxas` of the package nvidia-cuda-nvcc, or of the path."""
    for folder in sys.path:
        if (packaged := Path(folder) / f"nvidia/cu{_CUDA_MAJOR}/bin/ptxas").is_file():
            return packaged
    found = shutil.which("ptxas")
    return None if found is None else Path(found)
