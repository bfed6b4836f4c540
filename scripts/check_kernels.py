"""Compiles every kernel for chips that are not there, at published shapes; prints what the compiler says.

    python scripts/check_kernels.py [--chip v5e] [--chip v6e] [--only TEXT] [--quick]
                                    [--static-cost-tool PATH] [--json]
    python scripts/check_kernels.py --chip h100|h200|b200 [--quick] [--json]

Needs libtpu, no accelerator. With a static cost tool (a program that takes `module:function --topology T
--kwargs JSON --path DIR` and prints JSON with a list `kernels`) the modelled time, the bytes read, the share
of peak bandwidth and the instructions that put registers aside (vector + scalar) are shown as well. So is, of
attention, how often the kernel moves the bytes that it has to move (`needed_bytes.py`), with K and V counted
once for each tile of queries ("of needed") and once for all of a sequence's queries ("of least").

A GPU is compiled for alone, and needs JAX's CUDA plugin (exit code 2 without it), no GPU.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import jax  # noqa: E402
from gpu_static import check_gpu  # noqa: E402
from kernel_cases import CASES, Built, Case, build  # noqa: E402
from needed_bytes import needed_bytes  # noqa: E402
from recurrent_cases import RECURRENT_CASES, RecurrentCase  # noqa: E402
from sharded_cases import SHARDED_CASES, STEP_CASES, StepCase  # noqa: E402

from pallas_kernels.aot import TPU_TOPOLOGIES, compile_for_tpu, tpu_mesh  # noqa: E402
from pallas_kernels.aot_gpu import GPU_CHIPS  # noqa: E402
from pallas_kernels.tpu.prefill import PrefillScalars  # noqa: E402

CHIP_ALIASES = {"v7x": "tpu7x"}
ALL_CASES: dict[str, Case | RecurrentCase | StepCase] = {
    **CASES,
    **SHARDED_CASES,
    **STEP_CASES,
    **RECURRENT_CASES,
}
NOT_FOLLOWED = ("write", "step")  # their scalars are computed on the device, where no cost tool sees them
COLUMNS = (
    *("kernel", "shape", "chip", "VMEM MB", "SMEM kB", "alias MB", "temp MB"),
    *("us", "read MB", "of needed", "of least", "bandwidth", "bound", "spills"),
)


def build_case(name: str) -> Built:
    """The call that a case is about."""
    case = ALL_CASES[name]
    return build(case) if isinstance(case, Case) else case.build()


def for_cost_tool(name: str) -> tuple[Any, Any]:
    """The jitted function and arguments of a case."""
    built = build_case(name)
    return jax.jit(built.function, donate_argnums=built.donate), built.arguments


def measure(name: str, chip: str, tool: str | None) -> dict[str, Any]:
    """One row: compiled memory and, with a tool, the static cost of the kernel."""
    case = ALL_CASES[name]
    with jax.set_mesh(tpu_mesh(chip)):  # the sizes of a kernel's buffers follow the chip
        built = build_case(name)
    compiled = compile_for_tpu(built.function, built.arguments, chip=chip, donate=built.donate)
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError("the compiler gave no memory analysis")
    row: dict[str, Any] = {
        "kernel": case.kernel,
        "shape": name,
        "chip": chip,
        **kernel_memory(compiled.as_text() or ""),
        "alias MB": round(memory.alias_size_in_bytes / 1e6, 1),
        "temp MB": round(memory.temp_size_in_bytes / 1e6, 2),
    }
    if tool is not None and case.kernel not in NOT_FOLLOWED:
        row |= static_cost(name, chip, tool)
    if isinstance(case, Case) and "moved MB" in row:
        row |= shares_of_needed(case, built, row["moved MB"] * 1e6)
    return row


def shares_of_needed(case: Case, built: Built, moved: float) -> dict[str, float]:
    """Bytes `moved` for one that has to move, with the kernel's tiles and with one tile a sequence."""
    scalars = built.arguments[0]
    tiles = scalars if isinstance(scalars, PrefillScalars) else None
    return {
        "of needed": round(moved / needed_bytes(case, tiles), 3),
        "of least": round(moved / needed_bytes(case), 3),
    }


def kernel_memory(program: str) -> dict[str, Any]:
    """Of a compiled program's kernels, the most VMEM one asks for (where one does), and the most bytes of
    scalars that are put into SMEM before one starts.
    """
    limits, scalars = [0], [0]
    for line in program.splitlines():
        if 'custom_call_target="tpu_custom_call"' not in line:
            continue
        limits += map(int, re.findall(r'"memory_space":"1","offset":"0","size":"(\d+)"', line))
        operands = line.partition("operand_layout_constraints={")[2].partition("}}")[0]
        scalars.append(sum(4 * int(size) for size in re.findall(r"[sf]32\[(\d+)\]\{0", operands)))
    return {"VMEM MB": round(max(limits) / 1e6, 1), "SMEM kB": round(max(scalars) / 1e3, 1)}


def static_cost(name: str, chip: str, tool: str) -> dict[str, Any]:
    """The tool's figures: time and bytes of all kernels of the case, the longest one's bandwidth and spills.

    Bytes moved are the kernels' own: an operand that the compiler put into VMEM before (q, mostly on tpu7x)
    is not in them. What the tool could not follow of the longest kernel is said in `note`.
    """
    command = [sys.executable, tool, "check_kernels:for_cost_tool", "--topology", TPU_TOPOLOGIES[chip]]
    command += ["--kwargs", json.dumps({"name": name}), "--path", str(ROOT), "--path", str(ROOT / "scripts")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"note": f"the tool gave no JSON (exit code {done.returncode})"}
    if "kernels" not in answer:
        return {"note": str(answer.get("error", "no kernels"))}
    kernel = max(answer["kernels"], key=lambda k: k["time_us"])
    unknown = kernel["unknown_smem_loads"] + kernel["unknown_vector_to_scalar"]
    if unknown or kernel.get("sim_error"):
        return {"note": f"no cost: {unknown} scalars the tool cannot follow, error {kernel.get('sim_error')}"}
    moved = ("hbm_read_bytes", "hbm_write_bytes")
    return {
        "us": round(sum(k["time_us"] for k in answer["kernels"]), 1),
        "read MB": round(sum(k["hbm_read_bytes"] for k in answer["kernels"]) / 1e6, 1),
        "moved MB": sum(k[what] for k in answer["kernels"] for what in moved) / 1e6,
        "bandwidth": round(kernel["hbm_utilisation"], 2),
        "bound": kernel["bound"],
        "spills": "{vmem} + {smem}".format(**kernel["spills"]),
    }


def main() -> int:
    """Prints a table; exit code 1 if a kernel does not compile."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--chip",
        action="append",
        type=lambda name: CHIP_ALIASES.get(name, name),
        choices=sorted([*TPU_TOPOLOGIES, *GPU_CHIPS]),
        help="default: v5e and v6e; v7x is tpu7x",
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="shapes whose kernel or name has it")
    parser.add_argument("--quick", action="store_true", help="one shape of each kernel")
    parser.add_argument("--static-cost-tool", metavar="PATH")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if any(chip in GPU_CHIPS for chip in args.chip or ()):
        if len(args.chip) > 1:
            parser.error("a GPU is compiled for alone")
        return check_gpu(args.chip[0], quick=args.quick, as_json=args.json)

    names = [
        name
        for name, case in ALL_CASES.items()
        if (case.quick or not args.quick) and (args.only in name or args.only in case.kernel)
    ]
    if not names:
        parser.error(f"no shape has {args.only!r} in its name")
    failed = False
    if not args.json:
        print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for chip in args.chip or ["v5e", "v6e"]:
        for name in names:
            try:
                row = measure(name, chip, args.static_cost_tool)
            except Exception as error:  # whatever the compiler raises is this row's result
                failed = True
                row = {
                    "kernel": ALL_CASES[name].kernel,
                    "shape": name,
                    "chip": chip,
                    "note": str(error)[:300],
                }
            if args.json:
                print(json.dumps(row), flush=True)
                continue
            print("| " + " | ".join(str(row.get(c, "")) for c in COLUMNS) + " |", flush=True)
            if "note" in row:
                print(f"  {name} on {chip}: {row['note']}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
