"""Measures decode attention on a CPU at 16k tokens of context, against the memory.

    python scripts/bench_attention.py [--json] [--rounds 10] [--context 16384] [--only TEXT]

Full attention of Gemma 3 270M (one KV head of 256, 4 query heads) and of one of four tensor-parallel parts
of Gemma 3 27B (4 of 128, 8 query heads). A step cannot be faster than its K and V can be read: the bound is
those bytes over the bandwidth of adding 1 to a large array in place, measured in the same run. Times are the
shortest; ratios above the aim of 3 are in italics.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import jax  # noqa: E402
from bench_recurrent import copy_bandwidth  # noqa: E402
from device_cases import attention_operation  # noqa: E402
from kernel_cases import CASES, Case  # noqa: E402

CONTEXT = 16_384
MODELS = ("gemma3-270m", "gemma3-27b/4")
DTYPES = ("float32", "bfloat16")
BLOCKS = (16, 128)
BATCHES = (1, 8)
AIM = 3.0  # times the bound
COLUMNS = ("case", "ms", "bound (ms)", "time / bound")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement, milliseconds; `ratio` is the time over the bound."""

    case: str
    ms: float
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


def measure(name: str, case: Case, rounds: int, bandwidth: float) -> Row:
    """The shortest of some rounds."""
    operation = attention_operation(case)
    x, rest = jax.device_put((operation.x, operation.rest))
    pool = jax.jit(operation.make_pool)()
    attend = jax.jit(lambda x, rest, pool: operation.call(None, x, rest, pool)[0])
    jax.block_until_ready(attend(x, rest, pool))
    seconds = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(attend(x, rest, pool))
        seconds = min(seconds, time.perf_counter() - start)
    bound = operation.work.moved / bandwidth
    return Row(case=name, ms=1e3 * seconds, bound_ms=1e3 * bound, ratio=seconds / bound)


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

    bandwidth = copy_bandwidth(args.rounds)
    if not args.json:
        print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s, {os.cpu_count()} cores")
        print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    rows = []
    for name, case in chosen.items():
        row = measure(name, case, args.rounds, bandwidth)
        rows.append(row)
        if not args.json:
            ratio = f"{row.ratio:.1f}" if row.ratio <= AIM else f"*{row.ratio:.1f}*"
            print(f"| {row.case} | {row.ms:.2f} | {row.bound_ms:.2f} | {ratio} |", flush=True)
    if args.json:
        head = {"jax": jax.__version__, "cores": os.cpu_count(), "copy_gb_s": bandwidth / 1e9}
        print(json.dumps({**head, "rows": [asdict(row) for row in rows]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
