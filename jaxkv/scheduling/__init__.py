"""Continuous batching over one cache: the scheduler, what it is told and what it answers."""

from jaxkv.scheduling.config import SchedulerConfig
from jaxkv.scheduling.output import FinishedRequest, SchedulerOutput, StepResult, TokenArrays
from jaxkv.scheduling.scheduler import Scheduler, SchedulerStats

__all__ = [
    "FinishedRequest",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulerStats",
    "StepResult",
    "TokenArrays",
]
