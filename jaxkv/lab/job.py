"""One replay as it is asked for: plan, memory and settings, as plain values that another process can take."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxkv.lab.flops import ModelCost
from jaxkv.lab.replay import Progress, replay
from jaxkv.lab.report import finer_blocks_note, replay_report
from jaxkv.lab.settings import ReplaySettings, blocks_for_everything
from jaxkv.lab.trace import Trace
from jaxkv.planning.make_plan import make_plan
from jaxkv.planning.plan import CachePlan, PlanConfig
from jaxkv.specs import KVCacheSpec

_ENOUGH = 2**30
"""Blocks with which a plan is made whose number of blocks is decided afterwards."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """memory: bytes of the pool, looked at where neither of these is given. num_blocks: usable blocks.
    fits: room for so many requests of the maximum length. keep_everything: so much that nothing is evicted.
    about: how the job was asked for, for the report.
    """

    model: str
    specs: dict[str, KVCacheSpec]
    config: PlanConfig
    memory: int
    settings: ReplaySettings
    cost: ModelCost | None = None
    num_blocks: int | None = None
    fits: float | None = None
    keep_everything: bool = False
    about: dict[str, Any] = dataclasses.field(default_factory=dict)

    def plan(self, trace: Trace) -> CachePlan:
        """Raises JaxkvError where the memory does not hold one request."""
        if self.num_blocks is not None:
            override: int | None = self.num_blocks + 1
        else:
            override = _ENOUGH if self.keep_everything or self.fits is not None else None
        config = dataclasses.replace(self.config, num_gpu_blocks_override=override)
        plan = make_plan(self.specs, config, self.memory)
        if self.keep_everything:
            return dataclasses.replace(plan, num_blocks=blocks_for_everything(plan, trace))
        if self.fits is not None:
            usable = math.ceil(self.fits * sum(plan.blocks_per_request))
            return dataclasses.replace(plan, num_blocks=usable + 1)
        return plan


def run_job(job: Job, trace: Trace, progress: Progress | None = None) -> dict[str, Any]:
    """Replays the trace; returns the report."""
    plan = job.plan(trace)
    result = replay(trace, plan, job.settings, cost=job.cost, progress=progress)
    report = replay_report(trace, result, job.model)
    note = finer_blocks_note(trace, plan)
    if note is not None:
        report["trace"]["notes"].append(note)
    return {**report, "asked": job.about}


Done = Callable[[int], None]
"""Told how many jobs have ended."""
