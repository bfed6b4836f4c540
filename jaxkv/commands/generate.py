"""`jaxkv generate`: answer prompts with a model."""

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from jaxkv.cli import INTERRUPTED
from jaxkv.errors import JaxkvError
from jaxkv.kv_cache_dtype import KV_CACHE_DTYPES
from jaxkv.memory_size import parse_memory_size
from jaxkv.unicode_text import check_unicode

if TYPE_CHECKING:
    from jaxkv.engine.llm import LLM
    from jaxkv.engine.outputs import RequestDelta, RequestOutput
    from jaxkv.engine.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add = parser.add_argument
    add(
        "--model", required=True, help="a GGUF file, a Hugging Face folder, or the name of an installed model"
    )
    add("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    add("--prompts", metavar="FILE", help="a UTF-8 text file with one prompt a line; empty lines are skipped")
    add("--max-tokens", type=int, default=64, help="most tokens to generate for each prompt (default 64)")
    add("--min-tokens", type=int, default=0, help="do not stop before so many tokens (default 0)")
    add("--temperature", type=float, default=0.0, help="0, the default, always takes the most likely token")
    add("--top-k", type=int, default=0, help="sample from this many most likely tokens; 0: all")
    add("--top-p", type=float, default=1.0, help="sample from the fewest tokens that reach this probability")
    add("--seed", type=int, default=0, help="the same seed gives the same answers (default 0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated")
    add("--ignore-eos", action="store_true", help="do not stop at the model's end tokens")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--memory", default="1GiB", metavar="SIZE", help="memory of the cache, such as 512MiB (default 1GiB)")
    add("--max-num-seqs", type=int, default=8, help="most requests that run at once (default 8)")
    add("--max-num-batched-tokens", type=int, default=1024, help="most tokens of one step (default 1024)")
    add("--max-model-len", type=int, help="longest prompt and answer together (default: what fits)")
    add("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="of weights and cache")
    add(
        "--kv-cache-dtype",
        default="auto",
        choices=("auto", *KV_CACHE_DTYPES),
        metavar="DTYPE",
        help=f"of keys and values: {', '.join(KV_CACHE_DTYPES)} (default: as --dtype)",
    )
    add(
        "--state-dtype",
        default="auto",
        choices=("auto", "bfloat16", "float32"),
        help="of recurrent states (default: the config's, else as the cache)",
    )
    add("--block-size", type=int, default=16, help="tokens of a cache block (default 16)")
    add("--no-prefix-caching", action="store_true", help="compute every prompt in full")


def run(args: argparse.Namespace) -> int:
    """What can be checked without the model is checked before loading it, the prompts before compiling."""
    prompts = read_prompts(args.prompt, args.prompts)
    for stop in args.stop:
        check_unicode("--stop", stop)
    memory = parse_memory_size(args.memory)
    llm_class, params_class = _import_engine()
    params = params_class(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )
    llm = llm_class(
        args.model,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        state_dtype=args.state_dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        memory=memory,
        block_size=args.block_size,
        enable_prefix_caching=not args.no_prefix_caching,
        seed=args.seed,
        warm_up=False,
    )
    llm.check(prompts)
    llm.warm_up(progress=sys.stderr.isatty())
    stream = len(prompts) == 1 and not args.json and sys.stdout.isatty()
    outputs, interrupted = _answer(llm, prompts, params, stream=stream)
    if args.json:
        print(json.dumps(_as_json(llm, outputs, interrupted=interrupted), ensure_ascii=False))
    elif stream:
        print()
    else:
        _print_texts(outputs)
    if interrupted:
        print("jaxkv: interrupted; printed what was generated", file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def read_prompts(prompts: list[str], path: str | None) -> list[str]:
    """The prompts of the command line and then those of the file. JaxkvError where there are none, and where
    one cannot be read as text.
    """
    for prompt in prompts:
        check_unicode("--prompt", prompt)
    found = list(prompts)
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise JaxkvError(f"cannot read the prompts file {path}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise JaxkvError(
                f"the prompts file {path} is not UTF-8 text: byte {error.object[error.start]:#04x} "
                f"at {error.start}"
            ) from None
        if "\0" in text:
            raise JaxkvError(
                f"the prompts file {path} is not text: it has a NUL byte at {text.index(chr(0))}"
            )
        # Not splitlines, which ends lines at form feeds and the like, too.
        found += [line for line in text.split("\n") if line.strip()]
        if len(found) == len(prompts):
            raise JaxkvError(f"the prompts file {path} holds no prompt")
    if not found:
        raise JaxkvError("give at least one prompt: --prompt TEXT or --prompts FILE")
    return found


def _import_engine() -> "tuple[type[LLM], type[SamplingParams]]":
    try:
        from jaxkv.engine.llm import LLM
        from jaxkv.engine.sampling_params import SamplingParams
    except ModuleNotFoundError as error:
        raise JaxkvError(
            f"generate needs {error.name}, which is not installed: pip install 'jaxkv[engine]' "
            "(or 'jaxkv[tpu]', 'jaxkv[gpu]' for an accelerator)"
        ) from None
    return LLM, SamplingParams


def _answer(
    llm: "LLM", prompts: list[str], params: "SamplingParams", *, stream: bool
) -> "tuple[list[RequestOutput], bool]":
    """Outputs in the order of the prompts, and whether the user interrupted:
    then with what there was until then.
    """
    finished: dict[str, RequestOutput] = {}

    def take(delta: "RequestDelta") -> None:
        if stream:
            print(delta.text, end="", flush=True)
        if delta.output is not None:
            finished[delta.request_id] = delta.output

    request_ids = llm.submit(prompts, params)
    with _first_interrupt_noted() as interrupts:
        while llm.has_unfinished_requests and not interrupts:
            for delta in llm.step():
                take(delta)
        for delta in llm.abort(request_ids):
            take(delta)
    return [finished[request_id] for request_id in request_ids], bool(interrupts)


@contextmanager
def _first_interrupt_noted() -> Iterator[list[int]]:
    """Ctrl-C is put in the list that is yielded instead of raised, so that no step is torn;
    a second one is raised.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            signal.default_int_handler(number, frame)
        noted.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _print_texts(outputs: "list[RequestOutput]") -> None:
    for number, output in enumerate(outputs):
        if len(outputs) > 1:
            print(f"{'' if number == 0 else chr(10)}>>> {output.prompt}")
        print(output.text)


def _as_json(llm: "LLM", outputs: "list[RequestOutput]", *, interrupted: bool) -> dict[str, Any]:
    metrics = llm.metrics
    return {
        "outputs": [
            {
                "prompt": output.prompt,
                "text": output.text,
                "token_ids": output.token_ids,
                "num_prompt_tokens": len(output.prompt_token_ids),
                "num_cached_tokens": output.num_cached_tokens,
                "cache_hit": None if output.cache_hit is None else asdict(output.cache_hit),
                "finish_reason": output.finish_reason,
                "time_to_first_token_s": output.metrics.time_to_first_token,
                "time_total_s": output.metrics.time_total,
            }
            for output in outputs
        ],
        "interrupted": interrupted,
        "tokens_per_second": metrics.tokens_per_second,
        "blocks_used_at_most": metrics.peak_blocks_used,
        "usable_blocks": metrics.usable_blocks,
    }
