"""Makes the tables of docs/hit_rates.md: hit rates of published models over memory, by eviction policy.

    python scripts/hit_rates.py --models FOLDER --mooncake FILE --weka FILE

FOLDER holds NAME.json, the configs of the models below. Every replay is sequential, with the trace's own
blocks, the plan that `jaxkv plan` makes by default, and memory for so many requests of the maximum length.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxkv.errors import JaxkvError
from jaxkv.eviction import DEFAULT_POLICY, POLICIES, Published
from jaxkv.lab.flops import model_cost
from jaxkv.lab.job import Job
from jaxkv.lab.loading import load_trace
from jaxkv.lab.progress import ProgressBar
from jaxkv.lab.settings import ReplaySettings
from jaxkv.lab.sweep import run_sweep
from jaxkv.lab.trace import Trace
from jaxkv.model_config import read_model_cache
from jaxkv.planning.plan import PlanConfig

MODELS = ("gemma-3-27b", "jamba-1.5-mini", "qwen3-next-80b-a3b", "lara-4-mini", "gpt-oss-120b")
FITS = (1, 4, 16, 64)
BATCHED_TOKENS = 8192


def job_of(path: Path, block_size: int, fits: float, policy: str) -> Job:
    model = read_model_cache(str(path))
    if model.max_model_len is None:
        raise JaxkvError(f"{path} names no maximum length")
    config = PlanConfig(
        max_model_len=model.max_model_len, max_num_batched_tokens=BATCHED_TOKENS, align_hybrid_blocks=True
    )
    return Job(
        model=path.stem,
        specs=model.specs(block_size),
        config=config,
        memory=0,
        settings=ReplaySettings(eviction=policy, max_num_batched_tokens=BATCHED_TOKENS),
        cost=model_cost(model),
        fits=fits,
        about={"sweep": None, "fits": fits, "eviction": policy},
    )


def load(path: str, skipped: int, requests: int | None) -> Trace:
    trace = load_trace(path)
    stop = None if requests is None else skipped + requests
    part = trace.requests[skipped:stop]
    if not part:
        raise JaxkvError(f"{path} has {len(trace.requests)} requests: none is left after {skipped}")
    return dataclasses.replace(trace, requests=part)


def tables(reports: Sequence[dict[str, Any]], policies: Sequence[str]) -> str:
    """One row for each model and memory: hit rates of the policies, the endless cache's beside them."""
    lines = [
        "| model | fits | memory | " + " | ".join(f"`{policy}`" for policy in policies) + " | endless |",
        "|---|---:|---:|" + "---:|" * (len(policies) + 1),
    ]
    points: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    for report in reports:
        if "error" in report:
            raise JaxkvError(f"{report['asked']}: {report['error']}")
        asked = report["asked"]
        points.setdefault((report["model"], asked["fits"]), {})[asked["eviction"]] = report
    for (model, fits), by_policy in points.items():
        first = next(iter(by_policy.values()))
        rates = [
            100 * by_policy[policy]["token_hit_rate"] if policy in by_policy else None for policy in policies
        ]
        best = max(rate for rate in rates if rate is not None)
        cells = ["" if r is None else f"**{r:.2f}**" if r == best else f"{r:.2f}" for r in rates]
        endless = 100 * (1 - first["tokens"]["never_computed"] / first["prompt_tokens"])
        size = first["plan"]["bytes"] / 2**30
        lines.append(f"| {model} | {fits:g} | {size:,.1f} GiB | {' | '.join(cells)} | {endless:.2f} |")
    means = []
    for policy in policies:
        rates = [100 * p[policy]["token_hit_rate"] for p in points.values() if policy in p]
        means.append(f"{sum(rates) / len(rates):.2f}" if len(rates) == len(points) else "")
    lines.append(f"| mean | | | {' | '.join(means)} | |")
    return "\n".join(lines)


def _draw(bar: ProgressBar, total: int, done: int) -> None:
    bar(done, total)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", type=Path, required=True, help="folder of config files")
    add("--mooncake", help="the conversation trace")
    add("--weka", help="the agentic sessions")
    add("--skip", type=int, default=0, help="leave out so many requests at the start of each trace")
    add("--requests", type=int, help="replay only so many of each trace")
    add("--policies", default=f"{DEFAULT_POLICY},{Published.name}", help="comma-separated")
    add("--only", default=",".join(MODELS), help="comma-separated names of models")
    add("--jobs", type=int, default=os.cpu_count() or 1)
    add("--json", metavar="FILE", help="also write all reports")
    args = parser.parse_args(argv)
    if args.skip < 0 or (args.requests is not None and args.requests < 1):
        raise JaxkvError(f"--skip {args.skip} and --requests {args.requests} choose no part of a trace")
    for policy in args.policies.split(","):
        if policy not in POLICIES:
            raise JaxkvError(f"unknown policy {policy!r}; known are {', '.join(POLICIES)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    policies = args.policies.split(",")
    everything: list[dict[str, Any]] = []
    for path in filter(None, (args.mooncake, args.weka)):
        loader = partial(load, path, args.skip, args.requests)
        block_size = loader().block_size
        if block_size is None:
            raise JaxkvError(f"{path} tells no blocks")
        jobs = [
            job_of(args.models / f"{name}.json", block_size, fits, policy)
            for name in args.only.split(",")
            for fits in FITS
            for policy in policies
        ]
        bar = ProgressBar(Path(path).stem)
        reports = run_sweep(jobs, loader, args.jobs, partial(_draw, bar, len(jobs)))
        bar.close()
        everything += reports
        print(
            f"{path}: {reports[0]['requests']['in_trace']:,} requests after {args.skip:,}\n\n"
            f"{tables(reports, policies)}\n",
            flush=True,
        )
    if args.json is not None:
        Path(args.json).write_text(json.dumps(everything), encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JaxkvError as error:
        print(f"hit_rates: {error}", file=sys.stderr)
        sys.exit(2)
