"""Measures the recurrent operations on a CPU: against the plain scan over tokens and against the memory.

    python scripts/bench_recurrent.py [--json] [--operation ssd] [--rounds 5] [--quick]

Sizes are those of published models, float32. Prefill is one sequence; decode one token for each of a batch.
A step cannot be faster than its states can be read and written: the bound is those bytes over the bandwidth
of adding 1 to a large array in place. That, numba's kernel where there is one, XLA's form and the plain scan
run in turn within every round, each for a tenth of a second at least, as steps of an engine follow each
other: memory is slower for some 50 ms after the plain scan, and a virtual machine's bandwidth changes from
minute to minute. Times are the shortest, ratios are of those. Freed memory serves the next call, as in an
engine (`jaxkv.engine.kept_memory`).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import copying  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.tree_util import Partial  # noqa: E402

from jaxkv.engine.kept_memory import keep_freed_memory  # noqa: E402
from pallas_kernels import RaggedBatch  # noqa: E402
from pallas_kernels.cpu import available  # noqa: E402
from pallas_kernels.recurrent import (  # noqa: E402
    StateLayout,
    StateTable,
    gated_delta_rule,
    known,
    selective_scan,
    ssd,
)

PAGE_ROWS = 128  # 64 KiB: 16 tokens of 8 KV heads of 128 in bfloat16
PREFILL = (1024, 4096)
DECODE = (1, 8, 64)
IN_A_ROW_SECONDS = 0.1
AIMS = {"prefill 4096": ("scan_ratio", 5.0), "decode 64": ("bound_ratio", 2.0)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement. Times in milliseconds.

    scan_ratio: the plain scan's time over the implementation's. copy_gb_s, bound_ms: the copy's gigabytes a
    second, read and written ones together, and what the states take at that rate; bound_ratio: the
    implementation's time over the bound's (all three of decodes only). meets_aim: None where there is no aim,
    and for what is not the first choice.
    """

    operation: str
    case: str
    implementation: str
    ms: float
    scan_ms: float
    scan_ratio: float
    copy_gb_s: float | None
    bound_ms: float | None
    bound_ratio: float | None
    meets_aim: bool | None


@dataclass(frozen=True)
class Sizes:
    """A published model's operation: the state's shape, and `call(rng, tokens)`, which gives a function of
    `(pages, batch, table, **place)` that is a pytree of its inputs.
    """

    model: str
    shape: tuple[int, ...]
    call: Callable[[np.random.Generator, int], Partial]


def _normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def _small(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.uniform(0.001, 0.1, size=shape), jnp.float32)


def jamba(rng: np.random.Generator, tokens: int) -> Partial:
    """Jamba 1.5 mini: 8,192 channels, state 16."""
    x, b, c = _normal(rng, tokens, 8192), _normal(rng, tokens, 16), _normal(rng, tokens, 16)
    a, d = -10 * _small(rng, 8192, 16), _normal(rng, 8192)
    return Partial(selective_scan, x, _small(rng, tokens, 8192), a, b, c, d)


def nemotron(rng: np.random.Generator, tokens: int) -> Partial:
    """Nemotron 3 nano: 64 heads of 64, state 128, 8 groups."""
    x, b, c = _normal(rng, tokens, 64, 64), _normal(rng, tokens, 8, 128), _normal(rng, tokens, 8, 128)
    return Partial(ssd, x, _small(rng, tokens, 64), -10 * _small(rng, 64), b, c, _normal(rng, 64))


def qwen3_next(rng: np.random.Generator, tokens: int) -> Partial:
    """Qwen3-Next 80B: 16 key heads, 32 value heads of 128."""
    q, k, v = _normal(rng, tokens, 16, 128), _normal(rng, tokens, 16, 128), _normal(rng, tokens, 32, 128)
    g, beta = -_small(rng, tokens, 32), 5 * _small(rng, tokens, 32)
    return Partial(gated_delta_rule, q, k, v, g, beta, scale=128**-0.5, l2norm_eps=1e-6)


OPERATIONS = {
    "selective_scan": Sizes("jamba-1.5-mini", (8192, 16), jamba),
    "ssd": Sizes("nemotron-3-nano", (64, 64, 128), nemotron),
    "gated_delta_rule": Sizes("qwen3-next-80b", (32, 128, 128), qwen3_next),
}

KNOWN = {
    "selective_scan": known.SELECTIVE_SCAN,
    "ssd": known.SSD,
    "gated_delta_rule": known.GATED_DELTA_RULE,
}


class Running:
    """One implementation of one case, compiled, with a pool of its own."""

    def __init__(self, sizes: Sizes, sequences: int, new: int, implementation: str) -> None:
        layout = StateLayout(shapes=(sizes.shape,), dtypes=("float32",), page_rows=PAGE_ROWS)
        rng = np.random.default_rng(0)
        pages_each = layout.num_pages
        blocks = rng.permutation(sequences * pages_each) + 1
        ids = jnp.asarray(blocks.reshape(sequences, pages_each), jnp.int32)
        nothing = jnp.zeros((sequences, 0), jnp.int32)
        table = StateTable(ids, ids, nothing, jnp.zeros((sequences, 0, pages_each), jnp.int32))
        decode = new == 1
        batch = RaggedBatch(
            positions=jnp.tile(jnp.arange(new, dtype=jnp.int32), sequences),
            seq_ids=jnp.repeat(jnp.arange(sequences, dtype=jnp.int32), new),
            query_starts=jnp.arange(sequences + 1, dtype=jnp.int32) * new,
            seq_lens=jnp.full(sequences, new, jnp.int32),
            num_decodes=jnp.int32(sequences if decode else 0),
            num_seqs=jnp.int32(sequences),
            decode_only=decode,
        )
        place = {"layout": layout, "part": 0, "layer_slot": 0, "layer_slots": 1}
        call = sizes.call(rng, sequences * new)

        def step(pages: jax.Array, call: Partial, batch: RaggedBatch, table: StateTable) -> Any:
            return call(pages, batch, table, implementation=implementation, **place)

        self._pages = jnp.zeros((sequences * pages_each + 1, PAGE_ROWS, 128), jnp.uint32)
        self._rest = (call, batch, table)
        lowered = jax.jit(step, donate_argnums=0).lower(self._pages, *self._rest)
        self._compiled = lowered.compile()
        self()

    def __call__(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        out, self._pages = self._compiled(self._pages, *self._rest)
        jax.block_until_ready((out, self._pages))
        return time.perf_counter() - start


def fast_implementations(name: str) -> list[str]:
    """What computes an operation on a CPU, first choice first."""
    serves = "numba" in KNOWN[name] and available.why_not() is None
    return ["numba", "xla"] if serves else ["xla"]


def measure(name: str, sequences: int, new: int, rounds: int) -> list[Row]:
    """The implementations in turn."""
    sizes = OPERATIONS[name]
    fast = fast_implementations(name)
    decode = new == 1
    sides: dict[str, Callable[[], float]] = {"copy": copying.Copying()} if decode else {}
    sides |= {side: Running(sizes, sequences, new, side) for side in (*fast, "reference")}
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for side, run in sides.items():
            spent = 0.0
            while spent < IN_A_ROW_SECONDS:
                seconds = run()
                best[side] = min(best[side], seconds)
                spent += seconds
    case = f"decode {sequences}" if decode else f"prefill {new}"
    rate = copying.bandwidth(best["copy"]) if decode else None
    bound = None if rate is None else 2 * 4 * prod(sizes.shape) * sequences / rate
    rows = []
    for side in fast:
        ratios = {
            "scan_ratio": best["reference"] / best[side],
            "bound_ratio": None if bound is None else best[side] / bound,
        }
        meets = None
        if case in AIMS and side == fast[0]:
            which, aim = AIMS[case]
            value = ratios[which] or 0.0
            meets = value >= aim if which == "scan_ratio" else value <= aim
        rows.append(
            Row(
                operation=name,
                case=case,
                implementation=side,
                ms=1000 * best[side],
                scan_ms=1000 * best["reference"],
                copy_gb_s=None if rate is None else rate / 1e9,
                bound_ms=None if bound is None else 1000 * bound,
                meets_aim=meets,
                **ratios,  # type: ignore[arg-type]
            )
        )
    return rows


def main() -> int:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--operation", action="append", choices=sorted(OPERATIONS), help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of every case (5)")
    parser.add_argument("--quick", action="store_true", help="the shortest prefill and the smallest batch")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")

    keep_freed_memory()
    cases = [(1, new) for new in PREFILL[: 1 if args.quick else None]]
    cases += [(sequences, 1) for sequences in DECODE[: 1 if args.quick else None]]
    rows = []
    if not args.json:
        print(f"{os.cpu_count()} cores")
        scan, memory = "scan (ms) | scan / ms", "copy (GB/s) | bound (ms) | ms / bound"
        print(f"| operation | case | implementation | ms | {scan} | {memory} |")
        print("|---|---|---|---|---|---|---|---|---|")
    for name in args.operation or OPERATIONS:
        for sequences, new in cases:
            measured = measure(name, sequences, new, args.rounds)
            rows += measured
            for row in [] if args.json else measured:
                print(as_line(row), flush=True)
    if args.json:
        head = {"jax": jax.__version__, "cores": os.cpu_count()}
        print(json.dumps({**head, "rows": [asdict(row) for row in rows]}, indent=1))
    return 0


def as_line(row: Row) -> str:
    """A row of the table; a ratio that misses its aim in italics."""
    bound = ["", "", ""]
    if row.bound_ms is not None:
        bound = [f"{row.copy_gb_s:.1f}", f"{row.bound_ms:.2f}", f"{row.bound_ratio:.1f}"]
    cells = [
        row.operation,
        row.case,
        row.implementation,
        f"{row.ms:.2f}",
        f"{row.scan_ms:.2f}",
        f"{row.scan_ratio:.1f}",
        *bound,
    ]
    if row.meets_aim is False:
        missed = 8 if AIMS[row.case][0] == "bound_ratio" else 5
        cells[missed] = f"*{cells[missed]}*"
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
