"""What the ops that look inside the cache answer."""

from typing import Any

from jaxkv.cache_manager import KVCacheManager
from jaxkv.events import BlockRemoved, BlockStored, KVCacheEvent
from jaxkv.hits import PrefixHit


def hit_entry(hit: PrefixHit) -> dict[str, Any]:
    """A look-up: its length, why it is not longer, and its blocks by group and position (0: not needed)."""
    return {
        "hit_tokens": hit.num_tokens,
        "limited_by": hit.limited_by,
        "lost_tokens": hit.lost_tokens,
        "shared_prefix_boundary": hit.branch_point,
        "hit_blocks": hit.blocks,
    }


def pool_entry(manager: KVCacheManager) -> dict[str, Any]:
    """The state of the pool: what is free, what is cached by group, who holds how much."""
    cached: dict[str, list[int]] = {}
    for part in manager.managers:
        leaders = manager.pool.cached_units(part.number)
        ids = manager.pool.members(part.number, leaders)[:: part.blocks_per_state].tolist()
        cached |= {str(group): sorted(blocks) for group, blocks in zip(part.group_ids, ids, strict=True)}
    return {
        "free_blocks": manager.num_free_blocks,
        "usage": round(manager.usage, 6),
        "cached_blocks_by_group": cached,
    }


def stats_entry(manager: KVCacheManager) -> dict[str, Any]:
    """The counters of look-ups since the start, in tokens."""
    stats = manager.prefix_cache_stats
    return {
        "requests": stats.requests,
        "queries": stats.queries,
        "hits": stats.hits,
        "preempted_requests": stats.preempted_requests,
        "preempted_queries": stats.preempted_queries,
        "preempted_hits": stats.preempted_hits,
        "too_short": stats.too_short,
        "lost_tokens_by_group": {str(group): tokens for group, tokens in sorted(stats.lost_tokens.items())},
    }


def events_entry(manager: KVCacheManager) -> dict[str, Any]:
    """The events since the last time, oldest first."""
    return {"events": [_event(event) for event in manager.take_events()]}


def _event(event: KVCacheEvent) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": type(event).__name__}
    if isinstance(event, BlockStored | BlockRemoved):
        entry |= {"group": event.group_idx, "block_hashes": [value.hex() for value in event.block_hashes]}
    if isinstance(event, BlockStored):
        parent = event.parent_block_hash
        entry |= {
            "parent_block_hash": None if parent is None else parent.hex(),
            "num_tokens": len(event.token_ids),
            "block_size": event.block_size,
            "kind": event.kv_cache_spec_kind,
            "sliding_window": event.kv_cache_spec_sliding_window,
        }
    return entry
