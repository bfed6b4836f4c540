"""Times the replay of a trace, and checks the laboratory's form of vLLM's policy against vLLM's own files.

    python scripts/bench_replay.py --trace FILE --model CONFIG
    python scripts/bench_replay.py --trace FILE --model CONFIG --requests 2000 --json --vllm FOLDER
    python scripts/bench_replay.py --trace FILE --model CONFIG --requests 300 --check --vllm FOLDER

FOLDER is where the .py files of vLLM's wheel were unpacked; see bench_host.py. Both sides serve the requests
one after the other through the same plan. Timed for jaxkv: everything, from the scheduler to the report's
counters. Timed for vLLM: its cache manager alone, with the hashes ready. With --check the hits of every
request are compared instead: jaxkv's with the eviction policy `vllm`, vLLM's from its scheduler.
"""

import argparse
import json
import platform
import resource
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from bench_host.vllm_import import import_vllm

import jaxkv
from jaxkv.errors import JaxkvError
from jaxkv.lab.job import Job
from jaxkv.lab.loading import load_trace
from jaxkv.lab.replay import Replay, replay
from jaxkv.lab.settings import CLOCKS, ReplaySettings
from jaxkv.lab.trace import Trace
from jaxkv.model_config import read_model_cache
from jaxkv.planning.make_plan import POLICIES
from jaxkv.planning.plan import CachePlan, PlanConfig


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--trace", required=True, help="a trace of requests")
    add("--model", required=True, help="a config.json")
    add("--requests", type=int, help="replay only so many")
    add("--block-size", type=int, default=16, help="tokens a block (16)")
    add("--fits", type=float, default=16.0, help="memory for so many requests of the maximum length (16)")
    add("--policy", default="unified", choices=POLICIES, help="of the plan (unified)")
    add("--clock", default="sequential", choices=CLOCKS, help="of jaxkv's side; vLLM's is always sequential")
    add("--max-model-len", type=int, help="tokens (the model's own maximum)")
    add("--max-num-seqs", type=int, default=256, help="requests at a time (256)")
    add("--max-num-batched-tokens", type=int, default=8192, help="tokens of a step (8192)")
    add("--vllm", type=Path, help="folder that holds vLLM's unpacked .py files")
    add("--check", action="store_true", help="compare hits instead of times")
    add("--json", action="store_true", help="print JSON instead of lines")
    args = parser.parse_args(argv)
    if args.check and args.vllm is None:
        raise JaxkvError("--check needs --vllm FOLDER")
    return args


def plan_of(args: argparse.Namespace, trace: Trace) -> CachePlan:
    model = read_model_cache(args.model)
    max_model_len = args.max_model_len or model.max_model_len
    if max_model_len is None:
        raise JaxkvError("the model's config names no maximum length: give --max-model-len")
    config = PlanConfig(
        policy=args.policy,
        max_model_len=max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        align_hybrid_blocks=True,
    )
    job = Job(
        model=model.name,
        specs=model.specs(args.block_size),
        config=config,
        memory=0,
        settings=ReplaySettings(),
        fits=args.fits,
    )
    return job.plan(trace)


def fitting(trace: Trace, plan: CachePlan) -> Trace:
    """Without the requests that the plan cannot hold, which vLLM would refuse as well."""
    kept = [
        request
        for request in trace.requests
        if request.num_prompt_tokens + request.num_output_tokens <= plan.max_model_len
    ]
    return Trace(trace.source, trace.format, kept, trace.block_size)


def run_jaxkv(
    trace: Trace, plan: CachePlan, args: argparse.Namespace, **settings: Any
) -> tuple[Replay, float]:
    start = time.process_time()
    result = replay(
        trace,
        plan,
        ReplaySettings(
            clock=args.clock,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            **settings,
        ),
    )
    return result, time.process_time() - start


def check(trace: Trace, plan: CachePlan, args: argparse.Namespace) -> dict[str, Any]:
    from bench_replay.vllm_replay import through_scheduler

    ours, _ = run_jaxkv(trace, plan, args, eviction="vllm")
    hits = [ours.recorder.hits_by_serial[serial] for serial in range(len(trace.requests))]
    theirs = through_scheduler(trace, plan, args.max_num_batched_tokens)
    differing = [
        {"request": trace.requests[serial].name, "jaxkv": hit, "vllm": their}
        for serial, (hit, their) in enumerate(zip(hits, theirs.hits, strict=True))
        if hit != their
    ]
    total = sum(request.num_prompt_tokens for request in trace.requests)
    return {
        "requests": len(trace.requests),
        "equal": len(trace.requests) - len(differing),
        "jaxkv_token_hit_rate": sum(hits) / total,
        "vllm_token_hit_rate": sum(theirs.hits) / total,
        "differing": differing[:20],
    }


def measure(trace: Trace, plan: CachePlan, args: argparse.Namespace) -> dict[str, Any]:
    result, seconds = run_jaxkv(trace, plan, args)
    counts = result.recorder.counts
    figures: dict[str, Any] = {
        "requests": result.num_ended,
        "steps": result.num_steps,
        "jaxkv_token_hit_rate": counts.hits / max(1, counts.queries),
        "jaxkv_seconds": seconds,
        "jaxkv_requests_per_minute": 60 * result.num_ended / seconds,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if args.vllm is not None:
        from bench_replay.vllm_replay import through_manager

        theirs = through_manager(trace, plan, args.max_num_batched_tokens)
        total = sum(request.num_prompt_tokens for request in trace.requests)
        figures |= {
            "vllm_token_hit_rate": sum(theirs.hits) / total,
            "vllm_seconds": theirs.seconds,
            "ratio": theirs.seconds / seconds,
        }
    return figures


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    environment = {
        "date": date.today().isoformat(),
        "jaxkv": jaxkv.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    if args.vllm is not None:
        environment["vllm"] = import_vllm(args.vllm)
    trace = load_trace(args.trace)
    if args.requests is not None:
        trace = trace.first(args.requests)
    plan = plan_of(args, trace)
    trace = fitting(trace, plan)
    figures = check(trace, plan, args) if args.check else measure(trace, plan, args)
    if args.json:
        print(json.dumps({"environment": environment, "figures": figures}, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name}: {value:,.4g}" if isinstance(value, float) else f"{name}: {value}")
    return 1 if figures.get("differing") else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JaxkvError as error:
        print(f"bench_replay: {error}", file=sys.stderr)
        sys.exit(2)
