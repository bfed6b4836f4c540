"""The laboratory held against the engine: the same requests through a real model, the same counters."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from jaxkv.engine.llm import LLM
from jaxkv.engine.outputs import RequestOutput
from jaxkv.engine.sampling_params import SamplingParams
from jaxkv.errors import JaxkvError
from jaxkv.lab.content import Tokens
from jaxkv.lab.replay import replay
from jaxkv.lab.settings import ReplaySettings
from jaxkv.lab.trace import Trace, TraceRequest


class TraceCheck(NamedTuple):
    """Counters of the engine and of the replay, by name; see `counters`."""

    engine: dict[str, Any]
    simulated: dict[str, Any]

    @property
    def differing(self) -> list[str]:
        """Names of the counters that are not equal."""
        return [name for name, value in self.engine.items() if value != self.simulated[name]]


def check_trace(llm: LLM, trace: Trace, clock: str) -> TraceCheck:
    """Serves the trace with the model, then replays what was served without it.

    llm: fresh, with steps that do not overlap. clock: "sequential" or "as-fast-as-possible".
    The prompts' tokens must be known; ids beyond the model's vocabulary wrap round. The model writes its own
    answers, as long as the trace's; the replay is told them. Requests that are too long for the model are
    left out. Raises JaxkvError for traces without tokens, and where no request is left.
    """
    if clock not in ("sequential", "as-fast-as-possible"):
        raise JaxkvError(
            f"the engine has no clock of its own: sequential or as-fast-as-possible, not {clock}"
        )
    if llm.prefix_cache_stats.requests:
        raise JaxkvError("the engine has served requests already: its cache is not empty")
    requests = [_readable(request, llm) for request in trace.requests]
    requests = [
        request
        for request in requests
        if request.num_prompt_tokens + request.num_output_tokens <= llm.plan.max_model_len
    ]
    if not requests:
        raise JaxkvError(
            f"no request fits {llm.plan.max_model_len} tokens, the longest that the model serves"
        )
    outputs = _serve(llm, requests, one_by_one=clock == "sequential")
    served = [_answered(request, output) for request, output in zip(requests, outputs, strict=True)]
    config = llm.engine.scheduler.config
    settings = ReplaySettings(
        clock=clock, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
    )
    result = replay(dataclasses.replace(trace, requests=served), llm.plan, settings)
    stats = llm.prefix_cache_stats
    return TraceCheck(
        engine={
            "hit_tokens_by_request": [output.num_cached_tokens for output in outputs],
            "prefix_cache_queries": stats.queries,
            "prefix_cache_hits": stats.hits,
            "resumed_hits": stats.preempted_hits,
            "preemptions": llm.engine.scheduler.stats.num_preemptions,
            "steps": llm.metrics.num_steps,
            "computed_tokens": llm.metrics.num_scheduled_tokens,
            "generated_tokens": llm.metrics.num_generated_tokens,
        },
        simulated={
            "hit_tokens_by_request": [hit for _, hit in sorted(result.recorder.hits_by_serial.items())],
            "prefix_cache_queries": result.recorder.counts.queries,
            "prefix_cache_hits": result.recorder.counts.hits,
            "resumed_hits": result.recorder.counts.resumed_hits,
            "preemptions": result.num_preemptions,
            "steps": result.num_steps,
            "computed_tokens": result.num_computed,
            "generated_tokens": result.num_generated,
        },
    )


def format_check(checked: TraceCheck) -> str:
    """The counters of both sides as a table, and which differ."""
    lines = [f"{'':24}{'engine':>15}{'replay':>15}"]
    for name, value in checked.engine.items():
        other = checked.simulated[name]
        if isinstance(value, list):
            equal = sum(a == b for a, b in zip(value, other, strict=True))
            lines.append(f"{name:24}{f'{equal:,} of {len(value):,} are equal':>30}")
        else:
            lines.append(f"{name:24}{value:>15,}{other:>15,}")
    lines.append("equal" if not checked.differing else f"different: {', '.join(checked.differing)}")
    return "\n".join(lines)


def _readable(request: TraceRequest, llm: LLM) -> TraceRequest:
    content = request.content
    if not isinstance(content, Tokens):
        raise JaxkvError("a model can only read a trace whose tokens are known: text, or a made-up one")
    prompt = content.prompt % llm.loaded.config.vocab_size
    return dataclasses.replace(request, content=Tokens(prompt.astype(np.int32), content.answer))


def _serve(llm: LLM, requests: list[TraceRequest], *, one_by_one: bool) -> list[RequestOutput]:
    prompts = [request.content.prompt.tolist() for request in requests if isinstance(request.content, Tokens)]
    params = [SamplingParams(max_tokens=r.num_output_tokens, ignore_eos=True) for r in requests]
    if not one_by_one:
        return llm.generate(prompts, params)
    return [llm.generate([prompt], [own])[0] for prompt, own in zip(prompts, params, strict=True)]


def _answered(request: TraceRequest, output: RequestOutput) -> TraceRequest:
    prompt, answer = np.array(output.prompt_token_ids, np.int32), np.array(output.token_ids, np.int32)
    return dataclasses.replace(request, num_output_tokens=len(answer), content=Tokens(prompt, answer))
