"""A plan as plain values, for JSON and for tables."""

from collections.abc import Sequence
from typing import Any

from jaxkv.planning.capacity import longest_at_once, steady_concurrency
from jaxkv.planning.plan import CacheGroup, CachePlan
from jaxkv.planning.waste import Waste, mean_wasted_fraction, waste_by_group, waste_of
from jaxkv.specs import AttentionSpec, FullAttentionSpec, KVCacheSpec, MambaSpec, ScratchSpec

REPORT_LENGTHS = (1024, 8192, 32768, 131072)
"""Tokens of the requests whose bytes and number are told, beside the maximum length."""


def plan_report(plan: CachePlan, truth: CachePlan | None = None) -> dict[str, Any]:
    """Everything a plan says, as values that JSON holds. Sizes are bytes, lengths are tokens.

    truth: a plan that knows what the layers need, where `plan` accounts windows as full attention.
    """
    steady = steady_concurrency(plan)
    has_cache = bool(plan.groups)
    return {
        "policy": plan.policy,
        "max_model_len": plan.max_model_len,
        "max_in_flight_tokens": plan.max_in_flight_tokens,
        "groups": [_group(plan, index, group) for index, group in enumerate(plan.groups)],
        "page_size_bytes": plan.page_size_bytes,
        "layer_slots": plan.layer_slots,
        "bytes_per_block": plan.bytes_per_block,
        "num_blocks": plan.num_blocks,
        "usable_blocks": plan.usable_blocks,
        "pool_bytes": plan.pool_bytes,
        "hash_block_size": plan.hash_block_size,
        "scheduler_block_size": plan.scheduler_block_size,
        "hit_alignment": plan.hit_alignment,
        "smallest_prefix_that_can_hit": plan.hit_alignment,
        "bytes_per_token": sum(bytes_per_token(group) for group in plan.groups),
        "growing_bytes_per_token": sum(bytes_per_token(group) for group in plan.groups if _grows(group)),
        "window_bytes": sum(window_bytes(group) for group in plan.groups),
        "bytes_per_state": sum(bytes_per_state(group) for group in plan.groups),
        "blocks_per_request": list(plan.blocks_per_request),
        "concurrency": round(plan.concurrency, 4) if has_cache else None,
        "steady_concurrency": round(steady.requests, 4) if has_cache else None,
        "steady_blocks_per_request": list(steady.blocks_per_request),
        "reserved_in_flight_blocks": steady.reserved_blocks,
        "max_num_seqs": plan.max_num_seqs,
        "tokens_each_at_max_num_seqs": longest_at_once(plan, plan.max_num_seqs),
        "capacity_tokens": int(plan.concurrency * plan.max_model_len) if has_cache else None,
        "lengths": [_length(plan, length, truth) for length in report_lengths(plan)] if has_cache else [],
        "waste": [waste_report(waste_of(plan, length)) for length in report_lengths(plan)],
        "notes": list(plan.notes),
    }


def report_lengths(plan: CachePlan) -> list[int]:
    """The lengths that a report tells about: those below the maximum, and the maximum."""
    return [n for n in REPORT_LENGTHS if n < plan.max_model_len] + [plan.max_model_len]


def waste_report(waste: Waste) -> dict[str, Any]:
    """Where one request's bytes go."""
    return {
        "num_tokens": waste.num_tokens,
        "held_bytes": waste.held_bytes,
        "needed_bytes": waste.needed_bytes,
        "padding_layers": waste.padding_layers,
        "page_padding": waste.page_padding,
        "block_tail": waste.block_tail,
        "reserved_states": waste.reserved_states,
        "wasted_fraction": round(waste.wasted_fraction, 6),
    }


def _length(plan: CachePlan, num_tokens: int, truth: CachePlan | None) -> dict[str, Any]:
    """Requests of one length: how many decode at once, and the bytes of one by group."""
    requests = steady_concurrency(plan, num_tokens).requests
    return {
        "num_tokens": num_tokens,
        "requests": round(requests, 4),
        "tokens": int(requests * num_tokens),
        "held_bytes_by_group": held_bytes_by_group(plan, num_tokens),
        "mean_wasted_fraction": round(mean_wasted_fraction(plan, num_tokens, truth), 6),
    }


def held_bytes_by_group(plan: CachePlan, num_tokens: int) -> list[int]:
    """Bytes of the pool that one request of `num_tokens` tokens holds, by group."""
    return [waste.held_bytes for waste in waste_by_group(plan, num_tokens)]


def _group(plan: CachePlan, index: int, group: CacheGroup) -> dict[str, Any]:
    spec = group.spec
    used = sum(plan.locations[name].num_slots for name in group.layer_names)
    return {
        "kind": spec.kind,
        "reach": reach_of(spec),
        "layer_names": list(group.layer_names),
        "block_size": spec.block_size,
        "page_size_bytes": spec.page_size_bytes,
        "page_content_bytes": spec.unpadded_page_size_bytes,
        "blocks_per_state": group.blocks_per_state,
        "empty_slots": plan.layer_slots * group.blocks_per_state - used,
        "bytes_per_token": bytes_per_token(group),
        "bytes_per_state": bytes_per_state(group),
        "blocks_per_request": plan.blocks_per_request[index],
        "prefix_cacheable": spec.prefix_cacheable,
        "is_eagle_group": group.is_eagle_group,
        "waste_at_max_model_len": waste_report(waste_by_group(plan, plan.max_model_len)[index]),
    }


def bytes_per_token(group: CacheGroup) -> int:
    """Bytes of content that one token adds in all layers of the group, as long as the layers keep it."""
    return sum(
        spec.unpadded_page_size_bytes // spec.block_size
        for spec in _specs(group)
        if isinstance(spec, AttentionSpec) and not isinstance(spec, ScratchSpec)
    )


def window_bytes(group: CacheGroup) -> int:
    """Bytes of content of the group's windows once they are full; 0 where the layers keep every token."""
    return 0 if _grows(group) else bytes_per_token(group) * (reach_of(group.spec) or 0)


def _grows(group: CacheGroup) -> bool:
    """Whether the layers keep every token, however long the sequence."""
    return isinstance(group.spec, FullAttentionSpec)


def bytes_per_state(group: CacheGroup) -> int:
    """Bytes of content of one recurrent state of all layers of the group."""
    return sum(spec.unpadded_page_size_bytes for spec in _specs(group) if isinstance(spec, MambaSpec))


def _specs(group: CacheGroup) -> Sequence[KVCacheSpec]:
    return [group.spec_of(index) for index in range(len(group.layer_names))]


def reach_of(spec: KVCacheSpec) -> int | None:
    """Tokens a layer of this spec attends to, None where all (or where the kind has no such number)."""
    return getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
