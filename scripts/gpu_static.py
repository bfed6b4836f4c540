"""What the compiler and the assembler say of the GPU kernels, for `check_kernels.py`."""

import json
import sys
from functools import partial
from typing import Any

import jax
from device_cases import attention_operation
from kernel_cases import CASES

from pallas_kernels.aot_gpu import compile_for_gpu, gpu_mesh

GPU_COLUMNS = ("kernel", "shape", "chip", "alias MB", "temp MB", "registers", "spilled", "shared KB")


def measure_gpu(name: str, chip: str) -> dict[str, Any]:
    """One row: compiled memory; registers, bytes spilled and shared memory of each kernel that was new.

    A spill is said in `note`.
    """
    case = CASES[name]
    operation = attention_operation(case)
    arguments = (operation.x, operation.rest, jax.eval_shape(operation.make_pool))
    built = compile_for_gpu(partial(operation.call, "pallas_gpu"), arguments, chip=chip, donate=2)
    memory = built.compiled.memory_analysis()
    if memory is None:
        raise RuntimeError("the compiler gave no memory analysis")
    row: dict[str, Any] = {
        "kernel": case.kernel,
        "shape": name,
        "chip": chip,
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
    for name, case in CASES.items():
        if quick and not case.quick:
            continue
        try:
            row = measure_gpu(name, chip)
        except Exception as error:  # whatever the compiler raises is this row's result
            row = {"kernel": case.kernel, "shape": name, "chip": chip, "note": str(error)[:300]}
        failed |= "note" in row
        if as_json:
            print(json.dumps(row), flush=True)
            continue
        print("| " + " | ".join(str(row.get(c, "")) for c in GPU_COLUMNS) + " |", flush=True)
        if "note" in row:
            print(f"  {name} on {chip}: {row['note']}", file=sys.stderr)
    return int(failed)
