"""Times the host side: look-ups, allocation, decode steps, hashing, scheduling; vLLM's beside it if asked.

    python scripts/bench_host.py                        # jaxkv alone, as a table
    python scripts/bench_host.py --json --vllm FOLDER   # and vLLM's Python files in the same process
    python scripts/bench_host.py --vllm FOLDER --eviction vllm   # with vLLM's policy: equal work

FOLDER is where the .py files of vLLM's wheel were unpacked. Nothing else of it is needed: imports of torch
and the like are answered with inert modules. The environment must have pydantic, msgspec, cbor2 and
packaging. The two sides run in turn within every round, and the ratio is taken within the round, so that
other load on the machine meets both alike.
"""

import argparse
import gc
import json
import platform
import sys
from collections import defaultdict
from datetime import date
from pathlib import Path

import numpy as np
from bench_host.cases import CASES, Case
from bench_host.jaxkv_side import JaxkvSide
from bench_host.layouts import LAYOUTS, Layout
from bench_host.report import Row, as_json, as_markdown, make_row
from bench_host.side import Side

import jaxkv
from jaxkv.errors import JaxkvError
from jaxkv.eviction import DEFAULT_POLICY, POLICIES, make_eviction_policy

SLOW_CASES = {"serve": 3}
"""Cases that take many seconds a round run at most so many rounds."""


def chosen(text: str, known: list[str], what: str) -> list[str]:
    names = text.split(",") if text else known
    for name in names:
        if name not in known:
            raise JaxkvError(f"unknown {what} {name!r}; known: {', '.join(known)}")
    return names


def run_case(case: type[Case], layout: Layout, sides: list[Side], rounds: int) -> list[Row]:
    """Alternates the sides, with the order turned round every round, after one round that is not counted."""
    running = {side.name: case(side, layout) for side in sides}
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for index in range(-1, rounds):
        order = list(running) if index % 2 else list(reversed(running))
        for name in order:
            gc.collect()
            gc.disable()
            figures = running[name].round(index)
            gc.enable()
            if index >= 0:
                for figure, value in figures.items():
                    seconds[figure, name].append(value)
    return [
        make_row(figure, layout.name, seconds[figure, "jaxkv"], seconds.get((figure, "vllm")))
        for figure in case.figures
    ]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--vllm", type=Path, help="folder that holds vLLM's unpacked .py files")
    parser.add_argument("--cases", default="", help=f"comma-separated, of: {', '.join(CASES)}")
    parser.add_argument(
        "--layouts", default="", help=f"comma-separated, of: {', '.join(x.name for x in LAYOUTS)}"
    )
    parser.add_argument(
        "--eviction",
        default=DEFAULT_POLICY,
        help=f"jaxkv's policy, of: {', '.join(POLICIES)}; vllm does what vLLM does ({DEFAULT_POLICY})",
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds of every case (7)")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        raise JaxkvError(f"--rounds must be at least 1, got {args.rounds}")
    make_eviction_policy(args.eviction)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    cases = chosen(args.cases, list(CASES), "case")
    layouts = chosen(args.layouts, [layout.name for layout in LAYOUTS], "layout")
    sides: list[Side] = [JaxkvSide(args.eviction)]
    environment: dict[str, object] = {
        "date": date.today().isoformat(),
        "jaxkv": jaxkv.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "eviction": args.eviction,
    }
    if args.vllm:
        from bench_host.vllm_import import import_vllm

        environment["vllm"] = import_vllm(args.vllm)
        from bench_host.vllm_side import VllmSide

        sides.append(VllmSide())
    rows: list[Row] = []
    for layout in LAYOUTS:
        for name in cases if layout.name in layouts else ():
            print(f"{layout.name}: {name}", file=sys.stderr)
            rows += run_case(CASES[name], layout, sides, min(args.rounds, SLOW_CASES.get(name, args.rounds)))
    print(json.dumps(as_json(rows, environment), indent=2) if args.json else as_markdown(rows))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JaxkvError as error:
        print(f"bench_host: {error}", file=sys.stderr)
        sys.exit(2)
