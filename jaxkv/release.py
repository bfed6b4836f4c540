"""Gives back what a request holds, in the order in which it may be evicted."""

from typing import TYPE_CHECKING

import numpy as np

from jaxkv.pool import Dropped

if TYPE_CHECKING:
    from jaxkv.cache_manager import KVCacheManager


def keep_end(cache: "KVCacheManager", row: int) -> None:
    """The end of what a request computed becomes a boundary: a chat goes on there, a preempted request
    resumes.
    """
    cacheable = [manager for manager in cache.managers if manager.cacheable]
    if not cacheable:
        return
    hashes = cache.rows.info(row).request.block_hashes(cache.hasher)
    known = min(int(cache.rows.position[row]), len(hashes) * cache.plan.hash_block_size)
    boundary = cache.lookup.replay_boundary(known + 1)
    if boundary:
        for manager in cacheable:
            manager.keep_boundary(row, hashes, boundary)


def free_row(cache: "KVCacheManager", row: int) -> None:
    """Lets go of all units of a row. Those that stay cached queue up with the end of the sequence first.

    Group by group would give up all of one group's blocks before any of the next one's, and with them every
    hit; interleaved by position, the hit only gets shorter.
    """
    pool = cache.pool
    freed: Dropped | None = None
    for manager in cache.managers:
        leaders, ends = manager.close_row(row)
        dropped = pool.drop(manager.number, leaders[::-1], ends[::-1])
        if len(dropped.leaders):
            freed = dropped if freed is None else _merge(freed, dropped)
    if freed is not None:
        pool.enqueue(freed.leaders)


def _merge(first: Dropped, second: Dropped) -> Dropped:
    """Both, by descending end; of equal ends the first's come first. Each is in that order already."""
    if len(first.leaders) < len(second.leaders):
        places, longer, shorter = np.searchsorted(-second.ends, -first.ends, side="left"), second, first
    else:
        places, longer, shorter = np.searchsorted(-first.ends, -second.ends, side="right"), first, second
    return Dropped(
        np.insert(longer.leaders, places, shorter.leaders), np.insert(longer.ends, places, shorter.ends)
    )
