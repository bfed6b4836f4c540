"""What the compiler and the assembler say of the GPU kernels, for `check_kernels.py`."""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from device_cases import RECURRENT_CASES, Operation, attention_operation, recurrent_operation
from kernel_cases import CASES, Case

from pallas_kernels import GroupTable
from pallas_kernels.aot_gpu import compile_for_gpu, gpu_mesh
from pallas_kernels.gpu.support import refuses_on_gpu
from pallas_kernels.settings import AttentionSettings

GPU_COLUMNS = ("kernel", "shape", "chip", "alias MB", "temp MB", "registers", "spilled", "shared KB")
Cases = dict[tuple[str, str], Callable[[], Operation]]


def gpu_cases(*, quick: bool) -> Cases:
    """By kernel and shape, what the GPU kernels serve: attention, writes, recurrent decodes."""
    made: Cases = {
        (case.kernel, name): partial(attention_operation, case)
        for name, case in CASES.items()
        if (case.quick or not quick) and _is_served(case)
    }
    decodes = {key: case for key, case in RECURRENT_CASES.items() if case.new == 1 and case.kernel != "conv"}
    return made | {key: partial(recurrent_operation, case) for key, case in decodes.items()}


def _is_served(case: Case) -> bool:
    place = AttentionSettings(layout=case.layout, layer_slot=0, layer_slots=1)
    table = GroupTable(block_ids=jnp.zeros((1, 1), jnp.int32), first_block=jnp.zeros(1, jnp.int32))
    q = jax.ShapeDtypeStruct((1, case.q_heads, case.head_size), case.activation_dtype)
    return refuses_on_gpu(place, table, q) is None


def measure_gpu(operation: Operation, chip: str) -> dict[str, Any]:
    """One row: compiled memory; registers, bytes spilled and shared memory of each kernel that was new.

    A spill is said in `note`.
    """
    arguments = (operation.x, operation.rest, jax.eval_shape(operation.make_pool))
    built = compile_for_gpu(partial(operation.call, "pallas_gpu"), arguments, chip=chip, donate=2)
    memory = built.compiled.memory_analysis()
    if memory is None:
        raise RuntimeError("the compiler gave no memory analysis")
    row: dict[str, Any] = {
        "alias MB": round(memory.alias_size_in_bytes / 1e6, 1),
        "temp MB": round(memory.temp_size_in_bytes / 1e6, 2),
        "registers": ", ".join(str(kernel.registers) for kernel in built.kernels),
        "spilled": sum(kernel.spilled_bytes for kernel in built.kernels),
        "shared KB": ", ".join(str(kernel.shared_bytes // 1024) for kernel in built.kernels),
    }
    if row["spilled"]:
        row["note"] = f"{row['spilled']} bytes of registers spilled"
    return row


def check_gpu(chip: str, *, quick: bool, as_json: bool) -> int:
    """Prints the table of a chip; 1 if a kernel does not compile or spills, 2 if nothing can be compiled."""
    try:
        gpu_mesh(chip)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    if not as_json:
        print("| " + " | ".join(GPU_COLUMNS) + " |\n|" + "---|" * len(GPU_COLUMNS))
    failed = False
    for (kernel, shape), make in gpu_cases(quick=quick).items():
        row: dict[str, Any] = {"kernel": kernel, "shape": shape, "chip": chip}
        try:
            row |= measure_gpu(make(), chip)
        except Exception as error:  # whatever the compiler raises is this row's result
            row["note"] = str(error)[:300]
        failed |= "note" in row
        if as_json:
            print(json.dumps(row), flush=True)
            continue
        print("| " + " | ".join(str(row.get(c, "")) for c in GPU_COLUMNS) + " |", flush=True)
        if "note" in row:
            print(f"  {shape} on {chip}: {row['note']}", file=sys.stderr)
    return int(failed)
