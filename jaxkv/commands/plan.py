"""`jaxkv plan`: how a model's cache is laid out, what fits, and where every byte goes."""

import argparse
import json

from jaxkv.memory_size import parse_memory_size
from jaxkv.model_config import read_model_cache
from jaxkv.planning.make_plan import POLICIES, make_plan
from jaxkv.planning.plan import PlanConfig
from jaxkv.planning.report import plan_report
from jaxkv.planning.table import format_plan

FALLBACK_MAX_MODEL_LEN = 8192
"""Tokens, for a config that does not say how long the model's sequences may be."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jaxkv plan`."""
    parser.add_argument(
        "--model", required=True, help="a config.json, a folder with one, a GGUF file, or gemma3-270m"
    )
    parser.add_argument("--memory", default="1GiB", help="the cache's memory, such as 4GiB (default: 1GiB)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block (default: 16)")
    parser.add_argument(
        "--max-model-len",
        type=int,
        help="tokens of the longest request (default: the model's own maximum, or the most that fits)",
    )
    parser.add_argument("--max-num-seqs", type=int, default=128, help="requests at a time (default: 128)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, help="tokens of one step (default: 2048)"
    )
    parser.add_argument("--dtype", default="auto", help="element type of the cache (default: the model's)")
    parser.add_argument(
        "--policy", default="unified", help=f"one of {', '.join(POLICIES)} (default: unified)"
    )
    parser.add_argument(
        "--page-alignment",
        type=int,
        default=4096,
        metavar="BYTES",
        help="pages are raised to a multiple of this; 1 gives the figures of vLLM (default: 4096)",
    )
    parser.add_argument(
        "--disable-hybrid-kv-cache-manager",
        action="store_true",
        help="account window and chunked layers as full attention",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Raises JaxkvError for bad input, before anything is printed."""
    memory = parse_memory_size(args.memory)
    model = read_model_cache(args.model)
    dtype = model.cache_dtype(args.dtype)
    plan = make_plan(model.specs(args.block_size, dtype), _plan_config(args, model.max_model_len), memory)
    if args.json:
        about = {"model": model.name, "num_layers": len(model.kinds), "dtype": dtype}
        print(json.dumps({**about, **plan_report(plan)}, indent=1))
    else:
        print(format_plan(plan, f"{model.name}: {len(model.kinds)} layers, {dtype}, policy {plan.policy}"))
    return 0


def _plan_config(args: argparse.Namespace, model_max_len: int | None) -> PlanConfig:
    """The options as a plan's configuration. The model's own maximum length may be lowered to fit."""
    own_maximum = model_max_len or FALLBACK_MAX_MODEL_LEN
    return PlanConfig(
        policy=args.policy,
        max_model_len=own_maximum if args.max_model_len is None else args.max_model_len,
        auto_fit_max_model_len=args.max_model_len is None,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        page_alignment_bytes=args.page_alignment,
        disable_hybrid_kv_cache_manager=args.disable_hybrid_kv_cache_manager,
        align_hybrid_blocks=True,
    )
