"""Replays a schedule: requests through the scheduler, step by step."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxkv.cache_manager import KVCacheManager
from jaxkv.errors import JaxkvError
from jaxkv.request import Request
from jaxkv.scenario.config import ScenarioConfig
from jaxkv.scenario.manager import make_manager
from jaxkv.scenario.ops import ScheduledRequest
from jaxkv.scenario.plan_mode import replay_plan
from jaxkv.scenario.scenario import Scenario
from jaxkv.scenario.tokens import DECODE_TOKEN_BASE
from jaxkv.scheduling.config import SchedulerConfig
from jaxkv.scheduling.output import SchedulerOutput
from jaxkv.scheduling.scheduler import Scheduler

#: A schedule that makes no progress for so many steps is stuck, which is an error of the scheduler.
MAX_IDLE_STEPS = 3


@dataclass
class _Tracked:
    """One request and what happened to it."""

    stated: ScheduledRequest
    request: Request | None = None
    refusal: str | None = None
    first_scheduled_step: int | None = None
    finished_step: int | None = None

    def entry(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "num_prompt_tokens": len(self.stated.tokens),
            "refused": self.refusal is not None,
        }
        if self.refusal is not None:
            return result | {"error": {"type": JaxkvError.__name__, "message": self.refusal}}
        assert self.request is not None
        return result | {
            "first_scheduled_step": self.first_scheduled_step,
            "hit_tokens": self.request.num_cached_tokens,
            "finished_step": self.finished_step,
            "preemptions": self.request.num_preemptions,
        }


def replay_schedule(scenario: Scenario) -> dict[str, Any]:
    """The answer: an entry for each request and step. Raises JaxkvError where the groups do not fit."""
    plan = replay_plan(scenario)
    manager = make_manager(plan, scenario.config)
    replay = ScheduleReplay(scenario, Scheduler(plan, manager, scheduler_config(scenario.config)), manager)
    steps = replay.run()
    return {
        "mode": "replay",
        "scheduler_block_size": plan.scheduler_block_size,
        "hash_block_size": plan.hash_block_size,
        "cache_hit_alignment_tokens": plan.scheduler_block_size,
        "num_steps": len(steps),
        "requests": {tracked.stated.request_id: tracked.entry() for tracked in replay.tracked},
        "steps": steps,
        "final_free_blocks": manager.num_free_blocks,
    }


def scheduler_config(config: ScenarioConfig) -> SchedulerConfig:
    """A step can never hold more requests than tokens, so the former is limited by the latter."""
    return SchedulerConfig(
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        max_num_batched_tokens=config.max_num_batched_tokens,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        watermark=config.watermark,
        async_scheduling=config.async_scheduling,
    )


class ScheduleReplay:
    """Runs a scenario's requests; the token at position p is always `DECODE_TOKEN_BASE` + p."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler, manager: KVCacheManager) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._batches_in_flight = scenario.config.batches_in_flight
        self._in_flight: list[SchedulerOutput] = []
        self.tracked = [_Tracked(request) for request in scenario.requests]
        self._by_id = {tracked.stated.request_id: tracked for tracked in self.tracked}
        self._pending = sorted(self.tracked, key=lambda tracked: tracked.stated.arrival_step)

    def run(self) -> list[dict[str, Any]]:
        """Steps until every request has ended. Raises JaxkvError where that never happens."""
        steps: list[dict[str, Any]] = []
        idle = 0
        while self._pending or self._scheduler.has_unfinished_requests:
            step = len(steps)
            self._add_arrivals(step)
            output = self._scheduler.schedule()
            self._in_flight.append(output)
            if len(output) or self._pending or len(self._in_flight) > 1:
                idle = 0
            elif self._scheduler.has_unfinished_requests:
                idle += 1
            if idle == MAX_IDLE_STEPS:
                waiting = [request.request_id for request in self._scheduler.waiting_requests()]
                raise JaxkvError(f"nothing runs at step {step}, and these requests wait: {waiting}")
            if len(output) or self._scheduler.has_unfinished_requests or self._pending:
                steps.append(self._step_entry(step, output))
            while len(self._in_flight) >= self._batches_in_flight:
                self._settle(self._in_flight.pop(0))
            if not len(output):
                while self._in_flight:
                    self._settle(self._in_flight.pop(0))
        return steps

    def _add_arrivals(self, step: int) -> None:
        while self._pending and self._pending[0].stated.arrival_step <= step:
            tracked = self._pending.pop(0)
            stated = tracked.stated
            request = Request(stated.request_id, stated.tokens, stated.output_len)
            try:
                self._scheduler.add_request(request)
            except JaxkvError as error:
                tracked.refusal = str(error)
            else:
                tracked.request = request

    def _step_entry(self, step: int, output: SchedulerOutput) -> dict[str, Any]:
        scheduled = output.num_scheduled_tokens()
        for request_id in scheduled:
            tracked = self._by_id[request_id]
            if tracked.first_scheduled_step is None:
                tracked.first_scheduled_step = step
        running = [request.request_id for request in self._scheduler.running_requests()]
        order = {request_id: index for index, request_id in enumerate(running)}
        entry: dict[str, Any] = {
            "step": step,
            "scheduled": dict(sorted(scheduled.items(), key=lambda item: order[item[0]])),
            "free_blocks": self._manager.num_free_blocks,
            "running": running,
        }
        if output.preempted:
            entry["preempted"] = list(output.preempted)
        entry["block_tables"] = {
            request_id: [list(ids) for ids in self._manager.get_block_ids(request_id)]
            for request_id in running
        }
        return entry

    def _settle(self, output: SchedulerOutput) -> None:
        """The step has run: every row that samples gets the token of its position."""
        positions = (output.num_computed + output.num_scheduled)[output.sampling]
        result = self._scheduler.update_from_output(output, (DECODE_TOKEN_BASE + positions).astype(np.int32))
        for finished in result.finished:
            self._by_id[finished.request.request_id].finished_step = output.step
