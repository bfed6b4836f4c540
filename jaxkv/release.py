"""Gives back what a request holds, in the order in which it may be evicted."""

from typing import TYPE_CHECKING

import numpy as np

from jaxkv.pool import Dropped

if TYPE_CHECKING:
    from jaxkv.cache_manager import KVCacheManager


def keep_end(cache: "KVCacheManager", row: int) -> None:
    """The end of what a request computed becomes a boundary:
    a chat goes on there, a preempted request resumes.
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
    freed: list[Dropped] = []
    for manager in cache.managers:
        leaders, ends = manager.close_row(row)
        freed.append(pool.drop(manager.number, leaders[::-1], ends[::-1]))
    if len(freed) == 1:
        pool.enqueue(freed[0].leaders)
        return
    leaders = np.concatenate([dropped.leaders for dropped in freed])
    ends = np.concatenate([dropped.ends for dropped in freed])
    # Stable: of equal ends the first manager's go first.
    pool.enqueue(leaders[np.argsort(-ends, kind="stable")])
