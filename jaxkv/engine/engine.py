"""The loop: requests in, steps scheduled and run, texts out."""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from jaxkv.cache_manager import KVCacheManager
from jaxkv.engine.answer_text import AnswerText, TokenDecoder
from jaxkv.engine.metrics import EngineMetrics
from jaxkv.engine.outputs import CacheHit, RequestDelta, RequestMetrics, RequestOutput, TokenLogprobs
from jaxkv.engine.prompts import Prompt
from jaxkv.engine.runner import ModelRunner, StartedStep, StepLogprobs
from jaxkv.engine.sampling_params import MAX_BANNED_TOKENS, SamplingParams
from jaxkv.engine.sampling_table import RowSampling, SamplingTable
from jaxkv.errors import JaxkvError
from jaxkv.hits import PrefixHit
from jaxkv.request import FinishReason, Request
from jaxkv.scheduling.output import StepResult
from jaxkv.scheduling.scheduler import Scheduler


@dataclass
class _Live:
    """A request that has not ended. request: the scheduler's."""

    request: Request
    sampling: RowSampling
    prompt: str | None
    text: AnswerText
    arrival: float
    first_token: float | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def params(self) -> SamplingParams:
        return self.sampling.params


class Engine:
    """Serves requests with one model.

    make_decoder: makes what turns one answer's tokens to text. end_token_ids: the model's own end tokens.
    With a scheduler that allows it, a step is scheduled and started before the results of the one before it
    are read.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        cache_manager: KVCacheManager,
        *,
        make_decoder: Callable[[], TokenDecoder],
        end_token_ids: Sequence[int],
        seed: int = 0,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.cache_manager = cache_manager
        self.metrics = EngineMetrics(usable_blocks=scheduler.plan.usable_blocks)
        self._make_decoder = make_decoder
        self._end_token_ids = tuple(end_token_ids)
        self._sampling = SamplingTable()
        self._live: dict[str, _Live] = {}
        self._started: StartedStep | None = None
        self._ids = itertools.count()
        self._seeds = np.random.default_rng(seed)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._live) or self._started is not None

    def add_request(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> str:
        """Puts a request in the queue and returns its id. Raises JaxkvError, and changes nothing, for a
        prompt that can never run and for more end and stop tokens than `min_tokens` can keep away.
        """
        request_id = f"request-{next(self._ids)}" if request_id is None else request_id
        own_end_tokens = () if params.ignore_eos else self._end_token_ids
        end_tokens = (*own_end_tokens, *params.stop_token_ids)
        request = Request(request_id, prompt.token_ids, params.max_tokens, end_token_ids=end_tokens)
        banned = self._banned_at_first(params)
        self.scheduler.add_request(request)
        if params.seed is None:
            params = replace(params, seed=int(self._seeds.integers(2**32)))
        first_end = request.num_prompt_tokens + params.min_tokens if banned else 0
        self._live[request_id] = _Live(
            request,
            RowSampling(params, first_end, banned),
            prompt.text,
            AnswerText(self._make_decoder(), params.stop, params.min_tokens),
            time.perf_counter(),
        )
        return request_id

    def _banned_at_first(self, params: SamplingParams) -> tuple[int, ...]:
        """The tokens that may not be chosen before `min_tokens` others. As in vLLM, the model's end tokens
        are among them even where they are ignored.
        """
        if not params.min_tokens:
            return ()
        banned = tuple(dict.fromkeys((*self._end_token_ids, *params.stop_token_ids)))
        if len(banned) > MAX_BANNED_TOKENS:
            raise JaxkvError(
                f"min_tokens can keep away at most {MAX_BANNED_TOKENS} end and stop tokens, not {len(banned)}"
            )
        return banned

    def abort(self, request_ids: Iterable[str]) -> list[RequestDelta]:
        """Ends requests wherever they are; ids of requests that have ended are skipped. What each had is its
        output.
        """
        deltas = []
        for request_id in request_ids:
            live = self._live.get(request_id)
            if live is not None:
                self.scheduler.abort(request_id)
                deltas.append(self._finish(live, "abort", live.text.finish(), ()))
        return deltas

    def step(self) -> list[RequestDelta]:
        """Runs one step; what it added to each request. Where steps overlap, of the step before."""
        begin = time.perf_counter()
        if self.scheduler.has_unfinished_requests:
            started = self._start()
            self.metrics.host_time += time.perf_counter() - begin
            if self.scheduler.config.async_scheduling:
                started, self._started = self._started, started
        else:
            started, self._started = self._started, None
        deltas = [] if started is None else self._collect(started)
        self.metrics.busy_time += time.perf_counter() - begin
        return deltas

    def _start(self) -> StartedStep:
        """Schedules a step and starts the device on it. It may be empty, where everything waits for one in
        flight.
        """
        output = self.scheduler.schedule()
        self.metrics.num_steps += 1
        self.metrics.num_scheduled_tokens += output.total_num_scheduled_tokens
        used = self.metrics.usable_blocks - self.cache_manager.num_free_blocks
        self.metrics.peak_blocks_used = max(self.metrics.peak_blocks_used, used)
        if not len(output):
            return StartedStep(output, None)
        self._sampling.refresh(
            output.rows, output.epochs, lambda i: self._live[output.request_ids[i]].sampling
        )
        return self.runner.start(output, self.scheduler.table, self.cache_manager, self._sampling)

    def _collect(self, started: StartedStep) -> list[RequestDelta]:
        """Waits for a step's tokens and gives them to their requests."""
        tokens = started.tokens()
        now = time.perf_counter()
        result = self.scheduler.update_from_output(started.output, tokens)
        logprobs = _wanted_logprobs(started, result, self._live)
        reasons: dict[str, FinishReason] = {
            ended.request.request_id: ended.reason for ended in result.finished
        }
        deltas = []
        for i, (request_id, token) in enumerate(result.new_tokens()):
            live = self._live[request_id]
            if live.first_token is None:
                live.first_token = now
            if live.params.logprobs is not None:
                live.logprobs.append(logprobs[i])
            deltas.append(self._advance(live, token, reasons.get(request_id)))
        self.metrics.num_generated_tokens += len(result)
        return deltas

    def _advance(self, live: _Live, token: int, reason: FinishReason | None) -> RequestDelta:
        """Adds one token to an answer. An end token adds no text."""
        text = "" if reason == "stop" else live.text.push((token,))
        if live.text.stopped and reason != "stop":
            reason = "stop"
            self.scheduler.finish_request(live.request.request_id)
        if reason is None:
            return RequestDelta(request_id=live.request.request_id, text=text, token_ids=(token,))
        return self._finish(live, reason, text + live.text.finish(), (token,))

    def _finish(
        self, live: _Live, reason: FinishReason, text: str, token_ids: tuple[int, ...]
    ) -> RequestDelta:
        request, now = live.request, time.perf_counter()
        del self._live[request.request_id]
        first = None if live.first_token is None else live.first_token - live.arrival
        output = RequestOutput(
            request_id=request.request_id,
            prompt=live.prompt,
            prompt_token_ids=tuple(request.prompt_token_ids.tolist()),
            text=live.text.text,
            token_ids=tuple(request.output_token_ids.tolist()),
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens or 0,
            cache_hit=None if request.prefix_hit is None else self._cache_hit(request.prefix_hit),
            logprobs=None if live.params.logprobs is None else tuple(live.logprobs),
            metrics=RequestMetrics(
                time_to_first_token=first,
                time_total=now - live.arrival,
                num_preemptions=request.num_preemptions,
            ),
        )
        return RequestDelta(request_id=request.request_id, text=text, token_ids=token_ids, output=output)

    def _cache_hit(self, hit: PrefixHit) -> CacheHit:
        group = hit.limited_by
        return CacheHit(
            tokens_by_group=hit.tokens_by_group,
            limited_by=group,
            limited_by_kind=None if group is None else self.scheduler.plan.groups[group].spec.kind,
            lost_tokens=hit.lost_tokens,
        )


def _wanted_logprobs(
    started: StartedStep, result: StepResult, live: Mapping[str, _Live]
) -> dict[int, TokenLogprobs]:
    """For those of the result's tokens whose requests want them, by index in the result."""
    wanted = [
        (i, count)
        for i, request_id in enumerate(result.request_ids.tolist())
        if (count := live[request_id].params.logprobs) is not None
    ]
    if not wanted:
        return {}
    logprobs = started.logprobs()
    samples: NDArray[np.intp] = np.searchsorted(started.output.sampling, result.indices)
    return {i: _token_logprobs(logprobs, int(samples[i]), count) for i, count in wanted}


def _token_logprobs(logprobs: StepLogprobs, row: int, count: int) -> TokenLogprobs:
    ids, values = logprobs.top_ids[row, :count].tolist(), logprobs.top[row, :count].tolist()
    return TokenLogprobs(logprob=float(logprobs.chosen[row]), top=dict(zip(ids, values, strict=True)))
