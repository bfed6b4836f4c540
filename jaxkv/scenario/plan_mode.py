"""Answers scenarios of mode `plan`: how the layers are grouped, what fits and what is wasted."""

from typing import Any

from jaxkv.planning.capacity import steady_concurrency
from jaxkv.planning.make_plan import make_plan, plan_from_groups
from jaxkv.planning.plan import CacheGroup, CachePlan, PlanConfig
from jaxkv.planning.waste import Waste, waste_by_group, waste_of
from jaxkv.scenario.config import ScenarioConfig
from jaxkv.scenario.scenario import Scenario

#: Lengths of a request for which the wasted share of its bytes is stated, beside the maximum length.
WASTE_LENGTHS = (1024, 8192)


def plan_answer(scenario: Scenario) -> dict[str, Any]:
    """The plan as plain JSON values. Raises JaxkvError where the plan is refused."""
    layers = {entry.name: entry.spec for entry in scenario.layers}
    plan = make_plan(layers, plan_config(scenario.config), scenario.available_memory)
    steady = steady_concurrency(plan)
    lengths = sorted(
        {length for length in WASTE_LENGTHS if length <= plan.max_model_len} | {plan.max_model_len}
    )
    return {
        "mode": "plan",
        "policy": plan.policy,
        "max_model_len": plan.max_model_len,
        "max_in_flight_tokens": plan.max_in_flight_tokens,
        "num_blocks": plan.num_blocks,
        "bytes_per_block": plan.bytes_per_block,
        "groups": [_group(plan, index, group) for index, group in enumerate(plan.groups)],
        "scheduler_block_size": plan.scheduler_block_size,
        "hash_block_size": plan.hash_block_size,
        "cache_hit_alignment_tokens": plan.scheduler_block_size,
        "blocks_per_request": list(plan.blocks_per_request),
        "blocks_per_max_len_request": sum(plan.blocks_per_request),
        "concurrency": round(plan.concurrency, 6),
        "steady_concurrency": round(steady.requests, 6),
        "kv_cache_size_tokens": int(plan.concurrency * plan.max_model_len),
        "wasted_bytes_of_max_len_request": _waste(waste_of(plan, plan.max_model_len)),
        **{
            f"wasted_fraction_at_{length}": round(waste_of(plan, length).wasted_fraction, 6)
            for length in lengths
        },
        "notes": list(plan.notes),
    }


def replay_plan(scenario: Scenario) -> CachePlan:
    """The plan around a replay's groups. Raises JaxkvError where they do not go together."""
    groups = [
        CacheGroup(layer_names=(f"group.{index}",), spec=entry.spec, is_eagle_group=entry.is_eagle_group)
        for index, entry in enumerate(scenario.groups)
    ]
    return plan_from_groups(groups, scenario.num_blocks, plan_config(scenario.config))


def plan_config(config: ScenarioConfig) -> PlanConfig:
    """What planning is asked for. Pages are not aligned to tiles: scenarios state bytes as vLLM does."""
    return PlanConfig(
        policy=config.policy,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        batches_in_flight=config.batches_in_flight,
        num_lookahead_tokens=config.num_lookahead_tokens,
        num_speculative_blocks=config.num_speculative_tokens,
        use_eagle=config.use_eagle,
        decode_context_parallel_size=config.decode_context_parallel_size,
        enable_prefix_caching=config.enable_prefix_caching,
        prefix_match_unit=config.prefix_match_unit,
        page_alignment_bytes=1,
        disable_hybrid_kv_cache_manager=config.disable_hybrid_kv_cache_manager,
        auto_fit_max_model_len=config.auto_fit_max_model_len,
        num_gpu_blocks_override=config.num_gpu_blocks_override,
    )


def _group(plan: CachePlan, index: int, group: CacheGroup) -> dict[str, Any]:
    spec = group.spec
    return {
        "layer_names": list(group.layer_names),
        "is_eagle_group": group.is_eagle_group,
        "spec": {
            "kind": spec.kind,
            "block_size": spec.block_size,
            "page_size_bytes": spec.page_size_bytes,
            "unpadded_page_size_bytes": spec.unpadded_page_size_bytes,
            "blocks_per_state": group.blocks_per_state,
            "max_blocks_per_request": plan.blocks_per_request[index],
        },
        "wasted_bytes_of_max_len_request": _waste(waste_by_group(plan, plan.max_model_len)[index]),
    }


def _waste(waste: Waste) -> dict[str, int]:
    return {
        "padding_layers": waste.padding_layers,
        "page_padding": waste.page_padding,
        "block_tail": waste.block_tail,
        "reserved_states": waste.reserved_states,
    }
