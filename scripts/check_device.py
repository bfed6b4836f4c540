"""Runs every operation on this machine's accelerator: results against references, times against its limits.

    python scripts/check_device.py [--platform gpu|tpu|cpu] [--only TEXT] [--quick] [--json]

First it measures what a copy and a matrix product reach here. Then, for each operation: the largest error
against the reference at a small size; the time at the published shape, and its share of the copy bandwidth
or, for attention of prefill chunks, of the matrix rate. `--quick` times the small size. Exit code 1 if a
result is wrong or a kernel does not run, 2 if there is no accelerator (or not the one asked for).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from device_cases import Operation, operations  # noqa: E402

COLUMNS = ("kernel", "shape", "implementation", "error", "limit", "us", "GB/s", "TFLOP/s", "share")
COPY_BYTES, MATRIX_SIZE = 2 << 30, 8192
QUICK_COPY_BYTES, QUICK_MATRIX_SIZE = 4 << 20, 256
ROUNDS = 5
ROUND_SECONDS = 0.05  # a round repeats a call until it takes about so long
NUDGE = 1e-8  # makes a call's activations depend on the call before


class Limits(NamedTuple):
    """What this device reaches: bytes/s read and written by a copy, operations/s of a bfloat16 product."""

    bandwidth: float
    rate: float


def seconds_a_call(repeat: Callable[[int], Callable[[], Any]]) -> float:
    """Shortest time of a call; `repeat(n)` gives a function that runs n of them, one after another."""
    run = repeat(1)
    jax.block_until_ready(run())
    count = 1
    while (once := _elapsed(run)) < ROUND_SECONDS and count < 1 << 12:
        count = min(max(2 * count, int(count * ROUND_SECONDS / max(once, 1e-6))), 1 << 12)
        run = repeat(count)
        jax.block_until_ready(run())
    return min(_elapsed(run) for _ in range(ROUNDS)) / count


def _elapsed(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def measure_limits(*, quick: bool) -> Limits:
    """A copy of 2 GiB and a product of 8,192 x 8,192 matrices (quick: of 4 MiB, of 256 x 256)."""
    size, side = (QUICK_COPY_BYTES, QUICK_MATRIX_SIZE) if quick else (COPY_BYTES, MATRIX_SIZE)

    @jax.jit
    def copy(words: jax.Array, count: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, x: x + jnp.uint32(1), words)

    @jax.jit
    def multiply(a: jax.Array, b: jax.Array, count: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, x: (x @ b).astype(jnp.bfloat16), a)

    words = jnp.zeros(size // 4, jnp.uint32)
    a = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16) / side**0.5
    copied = seconds_a_call(lambda count: partial(copy, words, jnp.int32(count)))
    multiplied = seconds_a_call(lambda count: partial(multiply, a, a, jnp.int32(count)))
    return Limits(2 * size / copied, 2 * side**3 / multiplied)


def error_of(operation: Operation) -> float:
    """Largest difference between an operation and its reference, outputs and, as float32, pools."""
    pool = operation.make_pool()
    got, want = (
        jax.jit(partial(operation.call, implementation))(operation.x, operation.rest, pool)
        for implementation in (None, "reference")
    )
    outputs = _largest(got[0].astype(jnp.float32), want[0].astype(jnp.float32))
    if operation.x.dtype == jnp.bfloat16:
        return max(outputs, float((got[1] != want[1]).any()))
    return max(outputs, _largest(*(jax.lax.bitcast_convert_type(x[1], jnp.float32) for x in (got, want))))


def _largest(got: jax.Array, want: jax.Array) -> float:
    """Largest difference in units of 1 + |want|; NaN where only one of them is NaN."""
    difference = np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64)) / (1 + np.abs(want))
    both = np.isnan(got) & np.isnan(want)
    return float(np.where(both, 0, difference).max())


def seconds_of(operation: Operation) -> float:
    """Time of a call at the operation's size, in place where it changes the pool."""

    @partial(jax.jit, donate_argnums=1)
    def repeated(x: jax.Array, pool: jax.Array, rest: Any, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        def again(_: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, pool = carry
            out, pool = operation.call(None, x, rest, pool)
            return x + (out * NUDGE).astype(x.dtype), pool

        return jax.lax.fori_loop(0, count, again, (x, pool))

    held = [jax.jit(operation.make_pool)()]

    def repeat(count: int) -> Callable[[], jax.Array]:
        def run() -> jax.Array:
            out, held[0] = repeated(operation.x, held[0], operation.rest, jnp.int32(count))
            return out

        return run

    return seconds_a_call(repeat)


def measure(
    make_small: Callable[[], Operation], make: Callable[[], Operation], limits: Limits
) -> dict[str, Any]:
    """One row: error at the small size, time and share of the device's limits at the other."""
    small = make_small()
    error = error_of(small)
    operation = make()
    seconds = seconds_of(operation)
    row: dict[str, Any] = {
        "implementation": operation.chosen,
        "error": float(f"{error:.2g}"),
        "limit": operation.tolerance,
        "wrong": not error <= operation.tolerance,
        "us": round(seconds * 1e6, 1),
        "GB/s": round(operation.work.moved / seconds / 1e9, 1),
        "share": round(operation.work.moved / seconds / limits.bandwidth, 3),
    }
    if operation.work.flops:
        rate = operation.work.flops / seconds
        row |= {"TFLOP/s": round(rate / 1e12, 2), "share": round(rate / limits.rate, 3)}
    return row


def main() -> int:
    """Prints the limits and a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--platform", choices=("gpu", "tpu", "cpu"), help="default: the accelerator found")
    parser.add_argument("--only", metavar="TEXT", default="", help="operations whose kernel or shape has it")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    found = jax.default_backend()
    if found != args.platform and (args.platform is not None or found == "cpu"):
        wanted = args.platform or "accelerator"
        print(f"no {wanted} here: JAX sees {found} ({jax.local_devices()[0].device_kind})", file=sys.stderr)
        return 2
    small, chosen = operations(small=True), operations(small=args.quick)
    names = [name for name in chosen if args.only in name[0] or args.only in name[1]]
    if not names:
        print(f"no operation has {args.only!r} in its name", file=sys.stderr)
        return 1
    limits = measure_limits(quick=args.quick)
    head = {"device": jax.local_devices()[0].device_kind, **limits._asdict()}
    if args.json:
        print(json.dumps(head), flush=True)
    else:
        print(f"{head['device']}: copy {limits.bandwidth / 1e9:.0f} GB/s (read and written), ", end="")
        print(f"bfloat16 product {limits.rate / 1e12:.1f} TFLOP/s\n")
        print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    failed = False
    for kernel, shape in names:
        row: dict[str, Any] = {"kernel": kernel, "shape": shape}
        try:
            row |= measure(small[kernel, shape], chosen[kernel, shape], limits)
        except Exception as error:  # whatever the compiler or the device raises is this row's result
            row |= {"note": f"{type(error).__name__}: {error}"[:300], "wrong": True}
        failed |= row["wrong"]
        if args.json:
            print(json.dumps(row), flush=True)
            continue
        print("| " + " | ".join(str(row.get(c, "")) for c in COLUMNS) + " |", flush=True)
        if row["wrong"]:
            print(f"  WRONG: {shape}: {row.get('note', 'error above the limit')}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
