"""`jaxkv plan`: how a model's cache is laid out, what fits, and where every byte goes."""

import argparse
import json

from jaxkv.accelerators import ACCELERATORS
from jaxkv.commands.files import write_file
from jaxkv.commands.plan_inputs import study_of
from jaxkv.errors import JaxkvError
from jaxkv.kv_cache_dtype import KV_CACHE_DTYPES
from jaxkv.planning.html_page import html_page
from jaxkv.planning.make_plan import POLICIES
from jaxkv.planning.study import study_report
from jaxkv.planning.study_table import format_comparison, format_study


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jaxkv plan`."""
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a config.json, a folder with one, a GGUF file, or gemma3-270m",
    )
    parser.add_argument("--model", help="the same as MODEL")
    parser.add_argument("--layers", metavar="FILE", help="a JSON list of layers instead of a model")
    add_machine(parser)
    add_serving(parser)
    parser.add_argument("--compare", action="store_true", help="one table with a row for each model")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--html", metavar="FILE", help="also write a page with drawings")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """The options that say which chips, and how much of their memory."""
    group = parser.add_argument_group("machine")
    group.add_argument("--memory", help="the cache's memory on one chip, such as 4GiB (default: 1GiB on cpu)")
    group.add_argument(
        "--accelerator", default="cpu", help=f"one of {', '.join(ACCELERATORS)} (default: cpu)"
    )
    group.add_argument("--chips", type=int, help="default: tensor parallel x data parallel")
    group.add_argument(
        "--tensor-parallel", type=int, default=1, help="chips that share one copy (default: 1)"
    )
    group.add_argument("--data-parallel", type=int, help="copies side by side (default: as the chips allow)")
    group.add_argument("--weights", metavar="SIZE", help="the weights' size, where the config does not tell")
    group.add_argument(
        "--weight-dtype", default="auto", help="element type of the weights (default: model's)"
    )


def add_serving(parser: argparse.ArgumentParser) -> None:
    """The options that say how requests are served."""
    group = parser.add_argument_group("serving")
    group.add_argument("--block-size", type=int, default=16, help="tokens a block (default: 16)")
    group.add_argument(
        "--max-model-len",
        type=int,
        help="tokens of the longest request (default: the model's own maximum, or the most that fits)",
    )
    group.add_argument("--max-num-seqs", type=int, default=128, help="requests at a time (default: 128)")
    group.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, help="tokens of one step (default: 2048)"
    )
    group.add_argument(
        "--dtype",
        "--cache-dtype",
        default="auto",
        help="of keys and values: bf16, fp8, int8 (default: model's)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        metavar="DTYPE",
        help=f"of keys and values alone: {', '.join(KV_CACHE_DTYPES)} (default: as --dtype)",
    )
    group.add_argument("--state-dtype", default="auto", help="of recurrent states (default: the family's)")
    group.add_argument("--policy", default="split", help=f"one of {', '.join(POLICIES)} (default: split)")
    group.add_argument(
        "--page-alignment",
        type=int,
        metavar="BYTES",
        help="pages are raised to a multiple of this; 1 gives vLLM's figures (default: the device's tile)",
    )
    group.add_argument(
        "--max-block-growth",
        type=int,
        default=16,
        metavar="N",
        help="how many times larger a block may become to fill whole tiles (policy split; default: 16)",
    )
    group.add_argument(
        "--disable-hybrid-kv-cache-manager",
        action="store_true",
        help="account window and chunked layers as full attention",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the plans. Raises JaxkvError for bad input, before anything is printed or written."""
    models = [*args.models, *([] if args.model is None else [args.model])]
    if bool(models) == (args.layers is not None):
        raise JaxkvError("give either models or --layers FILE")
    studies = [study_of(args, model) for model in models or [None]]
    if args.html is not None:
        write_file("--html", args.html, html_page(studies))
    if args.json:
        reports = [study_report(study) for study in studies]
        print(json.dumps(reports[0] if len(reports) == 1 else reports, indent=1))
    elif args.compare:
        print(format_comparison(studies))
    else:
        print("\n\n".join(format_study(study) for study in studies))
    return 0
