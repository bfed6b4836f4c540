"""One model on one machine, planned in every way: policy by policy, and with the hybrid manager off."""

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxkv.errors import JaxkvError
from jaxkv.planning.machine import Machine, MemoryBudget, device_warnings
from jaxkv.planning.make_plan import make_plan
from jaxkv.planning.plan import CachePlan, PlanConfig
from jaxkv.planning.report import plan_report, reach_of
from jaxkv.specs import KVCacheSpec

HYBRID_OFF = "hybrid manager off"


@dataclass(frozen=True, kw_only=True)
class PlanStudy:
    """plan: by the policy asked for. others: by name, a plan or why there is none.

    specs: the caches on one chip. memory_bytes: of one chip's pool. budget: how that came about, None where
    the memory was given. about: what else is known of the model, for reports.
    """

    name: str
    specs: dict[str, KVCacheSpec]
    config: PlanConfig
    machine: Machine
    memory_bytes: int
    plan: CachePlan
    others: dict[str, CachePlan | str]
    budget: MemoryBudget | None = None
    about: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def all_plans(self) -> dict[str, CachePlan | str]:
        """The plan asked for, then the others."""
        return {self.plan.policy: self.plan, **self.others}

    @cached_property
    def reports(self) -> dict[str, dict[str, Any]]:
        """The report of every plan there is, by name, the one asked for first."""
        plans = {name: plan for name, plan in self.all_plans.items() if isinstance(plan, CachePlan)}
        return {name: plan_report(plan, self.plan) for name, plan in plans.items()}


def make_study(
    name: str,
    specs: dict[str, KVCacheSpec],
    config: PlanConfig,
    machine: Machine,
    memory_bytes: int,
    *,
    budget: MemoryBudget | None = None,
    about: dict[str, Any] | None = None,
    warnings: tuple[str, ...] = (),
) -> PlanStudy:
    """Plans in every way. Raises JaxkvError where the way that was asked for is impossible."""
    plan = make_plan(specs, config, memory_bytes)
    others: dict[str, CachePlan | str] = {}
    for policy in ("split", "unified"):
        if policy != config.policy:
            others[policy] = _plan_or_reason(specs, dataclasses.replace(config, policy=policy), memory_bytes)
    if not config.disable_hybrid_kv_cache_manager:
        off = dataclasses.replace(config, policy="unified", disable_hybrid_kv_cache_manager=True)
        others[HYBRID_OFF] = _plan_or_reason(specs, off, memory_bytes)
    return PlanStudy(
        name=name,
        specs=specs,
        config=config,
        machine=machine,
        memory_bytes=memory_bytes,
        plan=plan,
        others=others,
        budget=budget,
        about=about or {},
        warnings=(*warnings, *device_warnings(plan, machine.accelerator)),
    )


def _plan_or_reason(specs: dict[str, KVCacheSpec], config: PlanConfig, memory: int) -> CachePlan | str:
    try:
        return make_plan(specs, config, memory)
    except JaxkvError as error:
        return str(error)


def layers_by_kind(specs: dict[str, KVCacheSpec]) -> dict[str, int]:
    """How many caches there are of each kind and reach: {"full": 3, "sliding_window 512": 15}."""
    return dict(Counter(f"{spec.kind} {reach_of(spec) or ''}".strip() for spec in specs.values()))


def study_report(study: PlanStudy) -> dict[str, Any]:
    """The study as values that JSON holds:
    the plan's own report, and beside it model, machine and the others.
    """
    return {
        "model": study.name,
        **study.about,
        "layers_by_kind": layers_by_kind(study.specs),
        **study.reports[study.plan.policy],
        "machine": _machine(study),
        "other_plans": {
            name: study.reports[name] if isinstance(plan, CachePlan) else {"refused": plan}
            for name, plan in study.others.items()
        },
        "warnings": list(study.warnings),
    }


def _machine(study: PlanStudy) -> dict[str, Any]:
    machine, kind = study.machine, study.machine.accelerator
    figures = {"memory": kind.memory, "fast_memory": kind.fast_memory, "scalar_memory": kind.scalar_memory}
    return {
        "accelerator": kind.name,
        "chips": machine.chips,
        "tensor_parallel": machine.tensor_parallel,
        "data_parallel": machine.data_parallel,
        "tile_bytes": kind.tile_bytes,
        "figures": {
            name: {"bytes": figure.num_bytes, "source": figure.source}
            for name, figure in figures.items()
            if figure is not None
        },
        "cache_bytes_per_chip": study.memory_bytes,
        "budget": None if study.budget is None else dataclasses.asdict(study.budget),
        "requests_of_max_model_len": round(study.plan.concurrency * machine.data_parallel, 4),
    }
