"""`jaxkv replay`: how often prompts of a trace hit, for any model and memory, with no accelerator."""

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jaxkv.commands.files import refuse_unwritable, write_file
from jaxkv.commands.plan import add_machine, add_serving
from jaxkv.commands.plan_inputs import DEFAULT_MEMORY
from jaxkv.commands.replay_jobs import GENERATED_BLOCK, SWEEPABLE, asked_of, combinations, job_of
from jaxkv.errors import JaxkvError, NoMemoryError
from jaxkv.eviction import DEFAULT_POLICY, POLICIES
from jaxkv.lab.generator import PATTERNS, generate
from jaxkv.lab.job import run_job
from jaxkv.lab.loading import FORMATS, load_trace
from jaxkv.lab.progress import ProgressBar
from jaxkv.lab.report import format_report
from jaxkv.lab.settings import CLOCKS
from jaxkv.lab.sweep import run_sweep
from jaxkv.lab.trace import Trace

IMPOSSIBLE = 2
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jaxkv replay`."""
    _add_trace(parser)
    parser.add_argument("--model", help="a config.json, a folder with one, a GGUF file, or gemma3-270m")
    parser.add_argument("--layers", metavar="FILE", help="a JSON list of layers instead of a model")
    add_machine(parser)
    add_serving(parser)
    parser.set_defaults(block_size=None)
    _add_replay(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", help="write the report; - for standard output")
    group.add_argument("--html", metavar="FILE", help="write a page with drawings")
    group.add_argument(
        "--engine",
        action="store_true",
        help="serve the trace with the real model as well, and compare the counters",
    )
    group.add_argument("--verify", metavar="REPORT", help="replay as a report says and compare the digests")


def _add_trace(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("trace")
    group.add_argument("--trace", metavar="FILE", help="a trace of requests")
    group.add_argument("--format", choices=FORMATS, help="of the trace (default: told from its first line)")
    group.add_argument(
        "--generate", metavar="PATTERN", help=f"a made-up trace: {', '.join(PATTERNS)} or mixed"
    )
    group.add_argument(
        "--requests", type=int, help="replay only so many, or generate so many (default: 1000)"
    )
    group.add_argument("--seed", type=int, default=0, help="of a made-up trace (default: 0)")
    group.add_argument(
        "--tokenizer", metavar="FILE", help="a tokenizer.json, for text (default: a token a byte)"
    )
    group.add_argument("--skip-bad-lines", action="store_true", help="count bad lines and go on")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("replay")
    group.add_argument("--blocks", type=int, metavar="N", help="usable blocks instead of a memory")
    group.add_argument(
        "--fits", type=float, metavar="N", help="memory for N requests of the maximum length instead"
    )
    group.add_argument("--infinite", action="store_true", help="memory for everything instead")
    group.add_argument(
        "--retention", default="sparse", help="sparse, dense, or an interval in tokens (default: sparse)"
    )
    group.add_argument(
        "--eviction",
        default=DEFAULT_POLICY,
        help=f"what goes first: {', '.join(POLICIES)} (default: {DEFAULT_POLICY})",
    )
    group.add_argument("--clock", default="sequential", choices=CLOCKS, help="when requests arrive")
    group.add_argument(
        "--step-seconds", type=float, default=0.02, help="of a step, for --clock trace (default: 0.02)"
    )
    group.add_argument(
        "--sweep",
        metavar="NAME=A:B,NAME=C:D",
        help=f"replay with every combination; names: {', '.join(SWEEPABLE)}",
    )
    group.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of a sweep")


def run(args: argparse.Namespace) -> int:
    """Returns 1 where --verify or --engine finds other decisions, 2 where no setting of a sweep is possible,
    130 after Ctrl-C: what was measured is printed then.
    """
    if args.verify is not None:
        return _verify(args.verify)
    if args.engine:
        return _check_engine(args)
    load = _loader(args)
    # Told before the replay, which may be long.
    _refuse_unwritable(args)
    draw = None if args.html is None else _drawer(args.html)
    reports = _run(args, load)
    failed = [report for report in reports if "error" in report]
    for report in failed:
        print(f"{report['asked']['sweep']}: {report['error']}")
    measured = [report for report in reports if "error" not in report]
    if draw is not None and measured:
        draw(measured)
    _print_report(
        args.json,
        reports[0] if args.sweep is None else {"sweep": reports},
        lambda: "\n\n".join(_headed(report) for report in measured),
    )
    if any(report["partial"] for report in measured):
        return INTERRUPTED
    return 0 if measured else IMPOSSIBLE


def _drawer(path: str) -> Callable[[list[dict[str, Any]]], None]:
    """Writes the page of some reports; needs the plotting library of the extra `lab`."""
    try:
        from jaxkv.lab.page import report_page
    except ModuleNotFoundError as error:
        raise JaxkvError(
            f"--html needs {error.name}, which is not installed: pip install 'jaxkv[lab]'"
        ) from None
    return lambda reports: write_file("--html", path, report_page(reports))


def _headed(report: dict[str, Any]) -> str:
    setting = report["asked"].get("sweep")
    return (f"== {setting}\n" if setting else "") + format_report(report)


def _print_report(path: str | None, report: dict[str, Any], text: Callable[[], str]) -> None:
    """To standard output as JSON where --json is "-"; else as text, and as JSON to the file of --json."""
    if path == "-":
        print(json.dumps(report, indent=1))
        return
    if path is not None:
        write_file("--json", path, json.dumps(report, indent=1) + "\n")
    print(text())


def _refuse_unwritable(args: argparse.Namespace) -> None:
    refuse_unwritable("--json", None if args.json == "-" else args.json)
    refuse_unwritable("--html", args.html)


# The trace


def _loader(args: argparse.Namespace) -> Callable[[], Trace]:
    """Loads the trace; picklable, for the processes of a sweep. Raises JaxkvError for odd combinations."""
    if (args.trace is None) == (args.generate is None):
        raise JaxkvError("give either --trace FILE or --generate PATTERN")
    if args.requests is not None and args.requests < 1:
        raise JaxkvError(f"--requests must be at least 1, got {args.requests}")
    if args.seed < 0:
        raise JaxkvError(f"--seed must be at least 0, got {args.seed}")
    if args.generate is not None:
        return partial(generate, args.generate, args.requests or 1000, args.seed)
    return partial(_load, args.trace, args.format, args.requests, args.tokenizer, args.skip_bad_lines)


def _load(
    path: str, trace_format: str | None, requests: int | None, tokenizer: str | None, skip_bad_lines: bool
) -> Trace:
    options: dict[str, Any] = {} if tokenizer is None else {"tokenize": _tokenizer(tokenizer)}
    trace = load_trace(path, trace_format, skip_bad_lines=skip_bad_lines, **options)
    return trace if requests is None else trace.first(requests)


def _tokenizer(path: str) -> Callable[[str], list[int]]:
    try:
        from jaxkv.engine.tokenizer import tokenizer_from_json
    except ModuleNotFoundError as error:
        raise JaxkvError(
            f"--tokenizer needs {error.name}, which is not installed: pip install 'jaxkv[engine]'"
        ) from None
    return tokenizer_from_json(Path(path), None).encode


# The replays


def _run(args: argparse.Namespace, load: Callable[[], Trace]) -> list[dict[str, Any]]:
    trace = load()
    if args.sweep is None:
        bar = ProgressBar("replaying")
        try:
            return [run_job(job_of(args, trace, None), trace, bar)]
        finally:
            bar.close()
    settings = combinations(args)
    jobs, reports = [], []
    for changed, words in settings:
        try:
            jobs.append(job_of(changed, trace, words))
        except NoMemoryError as error:
            reports.append({"asked": asked_of(changed, words), "error": str(error)})
    bar = ProgressBar("replays")
    try:
        reports += run_sweep(jobs, load, max(1, min(args.jobs, len(jobs))), lambda done: bar(done, len(jobs)))
    finally:
        bar.close()
    order = {words: place for place, (_, words) in enumerate(settings)}
    return sorted(reports, key=lambda report: order[report["asked"]["sweep"]])


# Checking against the engine


_OF_ENGINE = (
    "engine", "trace", "format", "generate", "requests", "seed", "tokenizer", "skip_bad_lines", "model",
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "memory", "block_size", "kv_cache_dtype",
    "state_dtype", "policy", "clock", "json", "jobs",
)  # fmt: skip


def _check_engine(args: argparse.Namespace) -> int:
    """Prints the counters of both; 1 where they differ."""
    if args.model is None:
        raise JaxkvError("--engine needs --model MODEL, with weights")
    defaults = vars(_options({}))
    others = [n for n in defaults if n not in _OF_ENGINE and getattr(args, n) != defaults[n]]
    if others:
        raise JaxkvError(f"--engine does not take {', '.join(f'--{n.replace("_", "-")}' for n in others)}")
    load = _loader(args)
    _refuse_unwritable(args)
    try:
        from jaxkv.engine.llm import LLM
        from jaxkv.engine.trace_check import check_trace, format_check
    except ModuleNotFoundError as error:
        raise JaxkvError(
            f"--engine needs {error.name}, which is not installed: pip install 'jaxkv[engine]'"
        ) from None
    llm = LLM(
        args.model,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        memory=DEFAULT_MEMORY if args.memory is None else args.memory,
        block_size=args.block_size or GENERATED_BLOCK,
        kv_cache_dtype=args.kv_cache_dtype,
        state_dtype=args.state_dtype,
        policy=args.policy,
        progress=True,
    )
    checked = check_trace(llm, load(), args.clock)
    counters = {"engine": checked.engine, "simulated": checked.simulated}
    _print_report(args.json, counters, lambda: format_check(checked))
    return 1 if checked.differing else 0


# Checking a report


def _options(asked: dict[str, Any]) -> argparse.Namespace:
    """The options that a report was made with; one that it does not name has its default: a report made
    before there was such an option did without it.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_arguments(parser)
    words: list[str] = []
    for name, value in asked.items():
        if name != "sweep" and value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            words.append(option if value is True else f"{option}={value}")
    try:
        args, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise JaxkvError(f"the report was made with options that make no sense: {error}") from None
    if unknown:
        raise JaxkvError(f"the report was made with options that are unknown here: {', '.join(unknown)}")
    return args


def _is_complete(report: object) -> bool:
    if not isinstance(report, dict) or report.get("partial"):
        return False
    told = report.get("digest"), report.get("asked"), report.get("token_hit_rate")
    return all(map(isinstance, told, (str, dict, float)))


def _verify(path: str) -> int:
    try:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JaxkvError(f"cannot read the report {path}: {error}") from None
    reports = saved.get("sweep", [saved]) if isinstance(saved, dict) else []
    checkable = [r for r in reports if _is_complete(r)] if isinstance(reports, list) else []
    if not checkable:
        raise JaxkvError(f"{path} holds no complete report of `jaxkv replay --json`")
    differing = 0
    for report in checkable:
        args = _options(report["asked"])
        trace = _loader(args)()
        again = run_job(job_of(args, trace, report["asked"].get("sweep")), trace)
        same = again["digest"] == report["digest"]
        differing += not same
        words = "same digest" if same else f"digest {again['digest']}, the report has {report['digest']}"
        rates = f"token hit rate {again['token_hit_rate']:.4f}, reported {report['token_hit_rate']:.4f}"
        print(f"{report['asked'].get('sweep') or path}: {words}; {rates}")
    return 1 if differing else 0
