"""Runs every operation on this machine's accelerator: results against references, times against its limits.

    python scripts/check_device.py [--platform gpu|tpu|cpu] [--only TEXT] [--quick] [--limit-minutes N]
                                   [--jobs N] [--json]

First it measures what a copy and a matrix product reach here. Then, for each operation: the largest error
against the reference at a small size; the time at the published shape, and its share of the copy bandwidth
or, for attention of prefill chunks, of the matrix rate. `--quick` times the small size (with `--platform cpu`
a trial of the script itself). `--jobs` threads compile a batch of operations, then they are measured: nothing
compiles meanwhile.

It takes 6 minutes at most: one shape of each kernel comes first, and what the time is too short for is named
as not run. Exit code 1 if a result is wrong or a kernel does not run, 2 if there is no accelerator (or not
the one asked for), 3 if all that ran is right and some did not run.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
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
ALL_ROUNDS_SECONDS = 1.0  # of a call that is slower than it should be
MOST_CALLS = 1000  # of a round
SHARE_GUESSED = 0.3  # of the device's limits: how many calls make a round
LAUNCH_SECONDS = 2e-5  # of a call at least
LIMIT_MINUTES = 6.0
JOBS, BATCH = 4, 12
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


class Prepared(NamedTuple):
    """What a row runs, compiled.

    pools: of the small size and of the other one; results: by the platform's implementation and by the
    reference; repeated: `calls` calls of the other size, one after another, its pool donated.
    """

    small: Operation
    operation: Operation
    pools: tuple[Callable[[], jax.Array], Callable[[], jax.Array]]
    results: tuple[Callable[..., Any], Callable[..., Any]]
    repeated: Callable[..., Any]
    calls: int


def prepare(make_small: Callable[[], Operation], make: Callable[[], Operation], limits: Limits) -> Prepared:
    """Makes and compiles both sizes; nothing is put on the device."""
    small, operation = make_small(), make()
    work = operation.work
    guessed = max(work.moved / limits.bandwidth, work.flops / limits.rate) / SHARE_GUESSED
    calls = int(min(max(ROUND_SECONDS / max(guessed, LAUNCH_SECONDS), 1), MOST_CALLS))

    def repeated(x: jax.Array, rest: Any, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        def again(_: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, pool = carry
            out, pool = operation.call(None, x, rest, pool)
            return x + (out * NUDGE).astype(x.dtype), pool

        # A count known when compiling: a GPU need not be asked after each call whether it was the last one.
        return jax.lax.fori_loop(0, calls, again, (x, pool))

    got, want = (_compiled(partial(small.call, name), small) for name in (None, "reference"))
    pools = tuple(jax.jit(each.make_pool).lower().compile() for each in (small, operation))
    return Prepared(
        small, operation, (pools[0], pools[1]), (got, want), _compiled(repeated, operation, donate=2), calls
    )


def _compiled(
    function: Callable[..., Any], operation: Operation, *, donate: int | None = None
) -> Callable[..., Any]:
    arguments = (operation.x, operation.rest, jax.eval_shape(operation.make_pool))
    return jax.jit(function, donate_argnums=donate).lower(*arguments).compile()


def error_of(prepared: Prepared) -> float:
    """Largest difference between an operation and its reference, outputs and, as float32, pools."""
    small = prepared.small
    arguments = jax.device_put((small.x, small.rest))
    pool = prepared.pools[0]()
    got, want = (run(*arguments, pool) for run in prepared.results)
    outputs = _largest(*(np.asarray(x[0]).astype(np.float32) for x in (got, want)))
    if small.x.dtype == jnp.bfloat16:
        return max(outputs, float((np.asarray(got[1]) != np.asarray(want[1])).any()))
    return max(outputs, _largest(*(np.asarray(x[1]).view(np.float32) for x in (got, want))))


def _largest(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference in units of 1 + |want|; NaN where only one of them is NaN."""
    with np.errstate(invalid="ignore", over="ignore"):  # words of a pool may be any number
        difference = np.abs(got.astype(np.float64) - want) / (1 + np.abs(want.astype(np.float64)))
    both = (np.isnan(got) & np.isnan(want)) | (got == want)
    return float(np.where(both, 0, difference).max())


def seconds_of(prepared: Prepared) -> float:
    """Time of a call at the operation's size, in place where it changes the pool."""
    x, rest = jax.device_put((prepared.operation.x, prepared.operation.rest))
    pool = prepared.pools[1]()

    def run() -> float:
        nonlocal pool
        begin = time.perf_counter()
        out, pool = prepared.repeated(x, rest, pool)
        jax.block_until_ready(out)
        return time.perf_counter() - begin

    first = run()
    rounds = min(max(int(ALL_ROUNDS_SECONDS / max(first, 1e-6)), 1), ROUNDS)
    return min(run() for _ in range(rounds)) / prepared.calls


def measure(prepared: Prepared, limits: Limits) -> dict[str, Any]:
    """One row: error at the small size, time and share of the device's limits at the other."""
    operation = prepared.operation
    error = error_of(prepared)
    seconds = seconds_of(prepared)
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


type Name = tuple[str, str]
"""Kernel and shape."""


def prepared_in_time(
    names: Sequence[Name], prepare_one: Callable[[Name], Prepared], *, jobs: int, deadline: float
) -> Iterator[tuple[Name, Callable[[], Prepared]]]:
    """Names in order, batch by batch, each with a function that gives what was made or raises what that did.

    Nothing is being made while a name is in use. Ends early where no time is left before `deadline`, in
    seconds of `time.monotonic`.
    """
    threads, longest = ThreadPoolExecutor(jobs), 0.0
    try:
        for begin in range(0, len(names), BATCH):
            batch = names[begin : begin + BATCH]
            futures = [threads.submit(prepare_one, name) for name in batch]
            if wait(futures, max(deadline - time.monotonic(), 0)).not_done:
                return
            for name, future in zip(batch, futures, strict=True):
                started = time.monotonic()
                if started + longest > deadline:
                    return
                yield name, future.result
                longest = max(longest, time.monotonic() - started)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def main() -> int:
    """Prints the limits and a table."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--platform", choices=("gpu", "tpu", "cpu"), help="default: the accelerator found")
    parser.add_argument("--only", metavar="TEXT", default="", help="operations whose kernel or shape has it")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--limit-minutes", type=float, metavar="N", default=LIMIT_MINUTES)
    parser.add_argument("--jobs", type=int, metavar="N", default=min(JOBS, os.cpu_count() or 1))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    deadline = began + 60 * args.limit_minutes

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
        print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)

    def prepare_one(name: Name) -> Prepared:
        return prepare(small[name], chosen[name], limits)

    failed, done = False, 0
    for (kernel, shape), prepared in prepared_in_time(names, prepare_one, jobs=args.jobs, deadline=deadline):
        row: dict[str, Any] = {"kernel": kernel, "shape": shape}
        try:
            row |= measure(prepared(), limits)
        except Exception as error:  # whatever the compiler or the device raises is this row's result
            row |= {"note": f"{type(error).__name__}: {error}"[:300], "wrong": True}
        done += 1
        failed |= row["wrong"]
        if args.json:
            print(json.dumps(row), flush=True)
            continue
        print("| " + " | ".join(str(row.get(c, "")) for c in COLUMNS) + " |", flush=True)
        if row["wrong"]:
            print(f"  WRONG: {shape}: {row.get('note', 'error above the limit')}", file=sys.stderr)
    if missing := names[done:]:
        listed = "; ".join(map(" ".join, missing))
        over = f"{args.limit_minutes:g} minutes are over"
        print(f"NOT RUN, {over}: {len(missing)} of {len(names)}: {listed}", file=sys.stderr)
    return 1 if failed else (3 if missing else 0)


if __name__ == "__main__":
    sys.exit(main())
