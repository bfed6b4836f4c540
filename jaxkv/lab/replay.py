"""Replays a trace through the scheduler and the cache manager that serve, with no model.

Steps are scheduled and answered as an engine would, and only counted where nothing is decided in them. What
comes out is a function of the trace, the plan and the settings: the same on every machine.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jaxkv.cache_manager import KVCacheManager
from jaxkv.errors import JaxkvError
from jaxkv.eviction import EvictionPolicy, FlopsPerByte, make_eviction_policy
from jaxkv.lab.content import HashCache
from jaxkv.lab.flops import ModelCost
from jaxkv.lab.recorder import Recorder
from jaxkv.lab.request import CountingTable, ReplayRequest
from jaxkv.lab.settings import ReplaySettings
from jaxkv.lab.trace import Trace
from jaxkv.planning.plan import CachePlan
from jaxkv.scheduling import Scheduler, SchedulerConfig

MOST_SAMPLES = 400
"""Of pool use, over a replay."""

Progress = Callable[[int, int], None]
"""Told how many requests of how many have ended."""


@dataclass(frozen=True)
class PoolSample:
    """The pool as request number `num_ended` ends, as parts of its usable blocks."""

    num_ended: int
    seconds: float
    held: float
    cached: float


@dataclass
class Replay:
    """What happened. seconds: on the replay's own clock. refused: requests that could never run, and why.

    running_sum: running requests, summed over steps. partial: interrupted before the end.
    """

    plan: CachePlan
    settings: ReplaySettings
    recorder: Recorder
    num_requests: int
    num_ended: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    running_sum: int = 0
    most_running: int = 0
    num_preemptions: int = 0
    num_computed: int = 0
    num_generated: int = 0
    num_hits_counted: int = 0
    states_kept: int = 0
    partial: bool = False
    refused: list[tuple[str, str]] = field(default_factory=list)
    samples: list[PoolSample] = field(default_factory=list)


def replay(
    trace: Trace,
    plan: CachePlan,
    settings: ReplaySettings,
    *,
    cost: ModelCost | None = None,
    progress: Progress | None = None,
    count_steps: bool = True,
) -> Replay:
    """Replays the whole trace. Ctrl-C ends it early: the result is then marked partial.

    cost: of the model's tokens, for FLOPs. count_steps: off, every step is really scheduled; slower, and
    otherwise the same.
    """
    run = _Run(trace, plan, settings, cost, count_steps)
    try:
        run.run(progress)
    except KeyboardInterrupt:
        run.result.partial = True
    return run.finish()


def _eviction(name: str, cost: ModelCost | None) -> EvictionPolicy:
    if name == FlopsPerByte.name and cost is not None:
        return FlopsPerByte(lambda num_tokens: cost.of_tokens(0, num_tokens))
    return make_eviction_policy(name)


class _Run:
    def __init__(
        self,
        trace: Trace,
        plan: CachePlan,
        settings: ReplaySettings,
        cost: ModelCost | None,
        count_steps: bool,
    ) -> None:
        self._trace = trace
        self._settings = settings
        self._count_steps = count_steps
        most = 1 if settings.clock == "sequential" else settings.max_num_seqs
        config = SchedulerConfig(max_num_seqs=most, max_num_batched_tokens=settings.max_num_batched_tokens)
        recorder = Recorder(cost)
        self._cache = KVCacheManager(
            plan,
            retention_interval=settings.retention_interval,
            eviction=_eviction(settings.eviction, cost),
            observer=recorder,
            max_num_seqs=most,
        )
        recorder.attach(self._cache)
        self._scheduler = Scheduler(plan, self._cache, config, table=CountingTable(most, 1))
        self._hashes = HashCache(plan.hash_block_size)
        self._next = 0
        # When the clock last went on without a step, and after how many steps.
        self._idle_until, self._idle_step = 0.0, 0
        self._sample_every = max(1, len(trace.requests) // MOST_SAMPLES)
        self.result = Replay(plan, settings, recorder, len(trace.requests))

    def run(self, progress: Progress | None) -> None:
        scheduler, result = self._scheduler, self.result
        no_tokens = np.zeros(self._settings.max_num_seqs, np.int32)
        while True:
            self._arrive()
            if not scheduler.has_unfinished_requests:
                if self._next == len(self._trace.requests):
                    return
                continue
            if self._count_steps:
                running = scheduler.num_requests_running
                steps = scheduler.count_decodes(self._steps_to_next_arrival())
                self._count(steps, running)
                result.num_computed += steps * running
                if steps and self._steps_to_next_arrival() <= 0:
                    continue
            output = scheduler.schedule()
            if not len(output):
                raise JaxkvError("the scheduler found nothing to do while requests wait")
            self._count(1, len(output))
            result.num_computed += output.total_num_scheduled_tokens
            pool = self._cache.pool
            free, plain = pool.num_free, len(pool.plain_ids())
            ended = scheduler.update_from_output(output, no_tokens[: len(output.sampling)]).finished
            for _ in ended:
                result.num_ended += 1
                if result.num_ended % self._sample_every == 0:
                    self._sample(free, plain)
                if progress is not None:
                    progress(result.num_ended + len(result.refused), result.num_requests)

    def _count(self, steps: int, running: int) -> None:
        result = self.result
        result.num_steps += steps
        result.running_sum += steps * running
        result.most_running = max(result.most_running, running if steps else 0)
        result.seconds = self._seconds_after(result.num_steps)

    def _arrive(self) -> None:
        """Hands the scheduler what has arrived by now; where nothing runs, the clock goes on to what does."""
        requests, clock = self._trace.requests, self._settings.clock
        while self._next < len(requests):
            idle = not self._scheduler.has_unfinished_requests
            arrival = requests[self._next].arrival
            if clock == "sequential" and not idle:
                return
            if clock == "trace":
                if idle and arrival > self.result.seconds:
                    self.result.seconds = arrival
                    self._idle_until, self._idle_step = arrival, self.result.num_steps
                if arrival > self.result.seconds:
                    return
            self._add(self._next)
            self._next += 1

    def _add(self, serial: int) -> None:
        traced = self._trace.requests[serial]
        try:
            self._scheduler.add_request(ReplayRequest(traced, serial, self._hashes))
        except JaxkvError as error:
            self.result.refused.append((traced.name, str(error)))

    def _steps_to_next_arrival(self) -> int:
        if self._settings.clock != "trace" or self._next == len(self._trace.requests):
            return 2**31
        arrival, num_steps = self._trace.requests[self._next].arrival, self.result.num_steps
        wait = int((arrival - self.result.seconds) / self._settings.step_seconds)
        # The quotient may be off by a rounding.
        wait = max(0, wait - 1)
        while self._seconds_after(num_steps + wait) < arrival:
            wait += 1
        return wait

    def _seconds_after(self, num_steps: int) -> float:
        """The clock after so many steps: the same however they are counted."""
        return self._idle_until + (num_steps - self._idle_step) * self._settings.step_seconds

    def _sample(self, num_free: int, num_plain: int) -> None:
        """The pool before a request gave up its blocks, as the accounts stood: they are not brought up to
        date, which would change what comes after.
        """
        result = self.result
        usable = max(1, result.plan.usable_blocks)
        held, cached = 1 - num_free / usable, (num_free - num_plain) / usable
        result.samples.append(PoolSample(result.num_ended, result.seconds, held, cached))

    def finish(self) -> Replay:
        result, stats = self.result, self._scheduler.stats
        result.num_preemptions = stats.num_preemptions
        result.num_generated = stats.generation_tokens
        result.num_hits_counted = self._cache.prefix_cache_stats.hits
        result.states_kept = result.recorder.states_kept()
        result.recorder.finish()
        return result
