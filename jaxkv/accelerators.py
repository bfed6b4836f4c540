"""What planning knows of each accelerator: memory, tiles, on-chip memory, and where every number is from."""

from typing import NamedTuple

from jaxkv.errors import JaxkvError

GIB = 2**30
MIB = 2**20
KIB = 2**10

TILE_BYTES = 4096
"""Bytes that a page is a whole number of, on every device: 8 x 128 words of 32 bits, one TPU tile of any
dtype. The pool is the same array everywhere, so that one plan serves all of them.
"""


class Figure(NamedTuple):
    """A number of bytes, and the page or file that states it."""

    num_bytes: int
    source: str


class Accelerator(NamedTuple):
    """memory: of one chip, None where it is the host's own.
    fast_memory: what a kernel's buffers must fit in (TPU: VMEM of one core; GPU: shared memory of one block).
    scalar_memory: where a TPU core keeps block tables while a kernel runs; None on GPUs.
    tile_bytes: what pages are raised to a multiple of.
    """

    name: str
    memory: Figure | None
    fast_memory: Figure | None = None
    scalar_memory: Figure | None = None
    tile_bytes: int = TILE_BYTES


_CLOUD = "https://cloud.google.com/tpu/docs/"
_JAX = "jax 0.12, jax/_src/tpu_info.py"
_CUDA = "CUDA C++ Programming Guide, technical specifications by compute capability"


def _tpu(name: str, page: str, hbm_gib: int, vmem_mib: int) -> Accelerator:
    return Accelerator(
        name,
        memory=Figure(hbm_gib * GIB, _CLOUD + page + ", HBM capacity per chip"),
        fast_memory=Figure(vmem_mib * MIB, _JAX + ", vmem_capacity_bytes of a core"),
        scalar_memory=Figure(MIB, _JAX + ", smem_capacity_bytes of a core"),
    )


def _gpu(name: str, memory_gb: int, source: str, capability: str) -> Accelerator:
    return Accelerator(
        name,
        memory=Figure(memory_gb * 10**9, source),
        fast_memory=Figure(227 * KIB, f"{_CUDA} {capability}: 227 KB of shared memory per thread block"),
    )


ACCELERATORS: dict[str, Accelerator] = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator("cpu", memory=None),
        _tpu("tpu-v4", "v4", 32, 16),
        _tpu("tpu-v5e", "v5e", 16, 128),
        _tpu("tpu-v5p", "v5p", 95, 64),
        _tpu("tpu-v6e", "v6e", 32, 128),
        _tpu("tpu-v7x", "tpu7x", 192, 64),
        _gpu("h100", 80, "NVIDIA H100 data sheet, SXM: 80 GB HBM3", "9.0"),
        _gpu("h200", 141, "NVIDIA H200 data sheet: 141 GB HBM3e", "9.0"),
        _gpu("b200", 180, "NVIDIA DGX B200 data sheet: 1,440 GB of 8 GPUs", "10.0"),
    )
}


def find_accelerator(name: str) -> Accelerator:
    """The accelerator of that name. Raises JaxkvError that names those known."""
    if not isinstance(name, str) or name not in ACCELERATORS:
        raise JaxkvError(f"unknown accelerator {name!r}; known are {', '.join(ACCELERATORS)}")
    return ACCELERATORS[name]
