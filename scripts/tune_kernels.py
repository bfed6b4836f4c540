"""Compares sizes of the TPU attention kernels and writes down those that beat the rule.

    python scripts/tune_kernels.py --static-cost-tool PATH [--chip v6e] [--only TEXT] [--write]
    python scripts/tune_kernels.py --device [--only TEXT] [--write]

Costs are modelled times (see `check_kernels.py`) or, with `--device`, times on this machine's TPU. For each
shape it varies tokens and then numbers (`pallas_kernels/tpu/tuning.py`), and keeps what gains 3 % or more.
Sizes that come to the same buffers are looked at once; none but the rule's where that is as fast as memory.
`--write` puts the rows into `pallas_kernels/tpu/tuned.json`, in place of those of all shapes it looked at.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
if "--device" not in sys.argv:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from check_device import seconds_a_call  # noqa: E402
from kernel_cases import CASES, Case, build, settings_of  # noqa: E402
from sharded_cases import SHARDED_CASES  # noqa: E402

from pallas_kernels.aot import TPU_TOPOLOGIES, tpu_mesh  # noqa: E402
from pallas_kernels.tpu import decode_plan, prefill_plan  # noqa: E402
from pallas_kernels.tpu.loaders import loader_of  # noqa: E402
from pallas_kernels.tpu.tuning import TABLE, Sizes, forced, shape_of  # noqa: E402

ALL_CASES: dict[str, Case] = {**CASES, **SHARDED_CASES}
LEAST_GAIN = 0.03
TOKENS = {"decode": (512, 1024, 2048, 4096), "prefill": (256, 512, 1024)}
MOST = {"decode": (2, 4, 8, 16), "prefill": (512, 1024, 2048)}


class Cost(NamedTuple):
    """Microseconds, and whether fewer than 3 % can be gained: the kernel is as fast as memory."""

    us: float
    is_least: bool


class Tuned(NamedTuple):
    """Costs of the rule's sizes and of the best ones."""

    rule: Cost
    sizes: Sizes
    best: Cost


def for_cost_tool(name: str, tokens: int, most: int) -> tuple[Any, Any]:
    """The jitted function of a case with these sizes, and its arguments."""
    sizes = Sizes(tokens, most)
    with forced(sizes):
        built = build(ALL_CASES[name])
    return jax.jit(built.function), built.arguments


def kernel_of(case: Case) -> str:
    """The kernel that a case is about."""
    return "decode" if case.new == 1 else "prefill"


def rule_of(case: Case) -> Sizes:
    """The rule's sizes."""
    if case.new == 1:
        return decode_plan.rule_of(case.layout)
    return prefill_plan.rule_of(loader_of(case.layout, case.activation_dtype, apart=True))


def buffers_of(case: Case, sizes: Sizes) -> tuple[int, int]:
    """What sizes come to: pages of a run and runs of a step, or pages of a chunk and queries of a tile."""
    settings, dtype = settings_of(case), case.activation_dtype
    width = -(-case.context // case.block_size) - case.oldest // case.block_size
    with forced(sizes):
        if case.new == 1:
            plan = decode_plan.plan_decode(
                settings, q_heads=case.q_heads, dtype=dtype, rows=case.sequences, table_width=width
            )
            return plan.run_pages, plan.runs
        group, tokens = case.q_heads // case.kv_heads, case.sequences * case.new
        plan = prefill_plan.plan_prefill(settings, group=group, tokens=tokens, table_width=width, dtype=dtype)
        return plan.blocks, plan.tile


def modelled_cost(tool: str, chip: str, name: str, sizes: Sizes) -> Cost | None:
    """By the tool; None where the kernel does not compile or cannot be followed."""
    command = [sys.executable, tool, "tune_kernels:for_cost_tool", "--topology", TPU_TOPOLOGIES[chip]]
    command += ["--kwargs", json.dumps({"name": name, **sizes._asdict()}), "--path", str(ROOT / "scripts")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout)
        kernel = max(answer["kernels"], key=lambda kernel: kernel["time_us"])
    except (json.JSONDecodeError, KeyError):
        return None
    unknown = kernel["unknown_smem_loads"] + kernel["unknown_vector_to_scalar"]
    if unknown or kernel.get("sim_error"):
        return None
    share = kernel["hbm_utilisation"] / answer["model"]["hbm_eff"]
    return Cost(kernel["time_us"], share > 1 - LEAST_GAIN)


def measured_cost(name: str, sizes: Sizes) -> Cost:
    """On this machine, of random pages."""
    call, arguments = for_cost_tool(name, **sizes._asdict())
    arrays = jax.tree.map(
        lambda x: jnp.ones(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x),
        arguments,
    )

    def repeat(count: int) -> Callable[[], Any]:
        return lambda: [call(*arrays) for _ in range(count)]

    return Cost(seconds_a_call(repeat) * 1e6, is_least=False)


def tune(
    case: Case, buffers: Callable[[Sizes], tuple[int, int]], cost: Callable[[Sizes], Cost | None]
) -> Tuned | None:
    """The best of the rule's sizes, of other tokens, then of other numbers with the best tokens; None where
    the rule has no cost.
    """
    costs: dict[Sizes, Cost] = {}
    seen: set[tuple[int, int]] = set()

    def best_of(candidates: list[Sizes]) -> Sizes:
        for sizes in candidates:
            made = buffers(sizes)
            if made not in seen and (value := cost(sizes)) is not None:
                costs[sizes] = value
            seen.add(made)
        return min(costs, key=lambda sizes: costs[sizes].us, default=candidates[0])

    kernel, rule = kernel_of(case), rule_of(case)
    best = best_of([rule])
    if rule not in costs:
        return None
    if not costs[rule].is_least:
        best = best_of([rule._replace(tokens=tokens) for tokens in TOKENS[kernel]])
        best = best_of([best._replace(most=most) for most in MOST[kernel]])
    return Tuned(costs[rule], best, costs[best])


def main() -> int:
    """Prints a row for each shape; with `--write` changes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chip", choices=sorted(TPU_TOPOLOGIES), default="v6e")
    parser.add_argument("--only", metavar="TEXT", default="", help="shapes whose name has it")
    parser.add_argument("--static-cost-tool", metavar="PATH")
    parser.add_argument("--device", action="store_true", help="times on this machine's TPU")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.device == (args.static_cost_tool is not None):
        parser.error("one of --static-cost-tool and --device is needed")
    if args.device and jax.default_backend() != "tpu":
        parser.error(f"--device needs a TPU, JAX sees {jax.default_backend()}")

    shapes: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for name, case in ALL_CASES.items():
        if args.only not in name or case.kernel != "attention":
            continue
        cost = partial(measured_cost, name)
        if not args.device:
            cost = partial(modelled_cost, args.static_cost_tool, args.chip, name)
        with nullcontext() if args.device else jax.set_mesh(tpu_mesh(args.chip)):
            shape = shape_of(kernel_of(case), settings_of(case), case.q_heads // case.kv_heads)
            tuned = tune(case, partial(buffers_of, case), cost)
        if tuned is None:
            print(f"{name}: the rule's sizes have no cost", file=sys.stderr)
            continue
        shapes.append(shape._asdict())
        us = {"rule": tuned.rule.us, "tuned": tuned.best.us}
        print(f"{name}: rule {us['rule']:.1f} us, {tuned.sizes} {us['tuned']:.1f} us", flush=True)
        if us["tuned"] > (1 - LEAST_GAIN) * us["rule"]:
            continue
        by = "device" if args.device else "model"
        rows.append({"shape": shapes[-1], "sizes": tuned.sizes._asdict(), "us": us, "by": by})
    if args.write:
        write(rows, shapes)
    return 0


def write(rows: list[dict[str, Any]], shapes: list[dict[str, Any]]) -> None:
    """Puts the rows into the table, one a line, in place of those of `shapes`."""
    kept = [row for row in json.loads(TABLE.read_text(encoding="utf-8")) if row["shape"] not in shapes]
    lines = ",\n".join(json.dumps(row) for row in [*kept, *rows])
    TABLE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
