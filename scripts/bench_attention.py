"""Measures decode attention on a CPU at 16k tokens of context, against the memory.

    python scripts/bench_attention.py [--json] [--rounds 10] [--context 16384] [--only TEXT]

Full attention of Gemma 3 270M (one KV head of 256, 4 query heads) and of one of four tensor-parallel parts
of Gemma 3 27B (4 of 128, 8 query heads). A step cannot be faster than its K and V can be read: the bound is
those bytes over the bandwidth of adding 1 to a large array in place. That, the implementation that is chosen
here and XLA's take turns on one pool. Times are the shortest; ratios above the aim of 3 are in italics.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import copying  # noqa: E402
import jax  # noqa: E402
from device_cases import Operation, attention_operation  # noqa: E402
from kernel_cases import CASES, Case  # noqa: E402

CONTEXT = 16_384
MODELS = ("gemma3-270m", "gemma3-27b/4")
DTYPES = ("float32", "bfloat16")
BLOCKS = (16, 128)
BATCHES = (1, 8)
AIM = 3.0  # times the bound
COLUMNS = ("case", "implementation", "ms", "copy (GB/s)", "bound (ms)", "time / bound")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement, milliseconds. copy_gb_s: of the memory, read and written. ratio: time over bound."""

    case: str
    implementation: str
    ms: float
    copy_gb_s: float
    bound_ms: float
    ratio: float


def cases(context: int) -> dict[str, Case]:
    """Every case by its name."""
    made = {}
    for model, dtype, block, batch in product(MODELS, DTYPES, BLOCKS, BATCHES):
        shape = CASES[f"{model} decode"]
        name = f"{model} {dtype}, block {block}, batch {batch}"
        made[name] = replace(shape, dtype=dtype, block_size=block, sequences=batch, context=context)
    return made


def measure(name: str, case: Case, rounds: int) -> list[Row]:
    """The shortest of some rounds, of the implementation chosen here and of XLA's."""
    operation = attention_operation(case)
    x, rest = jax.device_put((operation.x, operation.rest))
    pool = jax.jit(operation.make_pool)()
    calls = {
        implementation: jax.jit(partial(_output, operation, implementation))
        for implementation in dict.fromkeys((operation.chosen, "xla"))
    }
    seconds = dict.fromkeys(calls, float("inf"))
    for attend in calls.values():
        jax.block_until_ready(attend(x, rest, pool))
    copy, copied = copying.Copying(), float("inf")
    for _ in range(rounds):
        copied = min(copied, copy())
        for implementation, attend in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(attend(x, rest, pool))
            seconds[implementation] = min(seconds[implementation], time.perf_counter() - start)
    rate = copying.bandwidth(copied)
    bound = operation.work.moved / rate
    return [
        Row(
            case=name,
            implementation=implementation,
            ms=1e3 * took,
            copy_gb_s=rate / 1e9,
            bound_ms=1e3 * bound,
            ratio=took / bound,
        )
        for implementation, took in seconds.items()
    ]


def _output(operation: Operation, implementation: str, x: jax.Array, rest: Any, pool: jax.Array) -> jax.Array:
    return operation.call(implementation, x, rest, pool)[0]


def main() -> int:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of every case (10)")
    parser.add_argument("--context", type=int, default=CONTEXT, help=f"tokens of a sequence ({CONTEXT})")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name has it")
    args = parser.parse_args()
    for name in ("rounds", "context"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    chosen = {name: case for name, case in cases(args.context).items() if args.only in name}
    if not chosen:
        parser.error(f"no case has {args.only!r} in its name")

    if not args.json:
        print(f"{os.cpu_count()} cores")
        print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    rows = []
    for name, case in chosen.items():
        measured = measure(name, case, args.rounds)
        rows += measured
        for row in [] if args.json else measured:
            ratio = f"{row.ratio:.1f}" if row.ratio <= AIM else f"*{row.ratio:.1f}*"
            numbers = f"{row.ms:.2f} | {row.copy_gb_s:.1f} | {row.bound_ms:.2f} | {ratio}"
            print(f"| {row.case} | {row.implementation} | {numbers} |", flush=True)
    if args.json:
        head = {"jax": jax.__version__, "cores": os.cpu_count()}
        print(json.dumps({**head, "rows": [asdict(row) for row in rows]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
