"""Gives back what a request holds, in the order in which it may be evicted."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

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
    freed: list[NDArray[np.int32]] = []
    for manager in cache.managers:
        leaders, positions = manager.close_row(row)
        cache.last_token[leaders] = positions
        cached = pool.drop(manager.number, leaders[::-1])
        if len(cached):
            freed.append(cached)
    if len(freed) > 1:
        leaders = np.concatenate(freed)
        freed = [leaders[np.argsort(-cache.last_token[leaders], kind="stable")]]
    for leaders in freed:
        pool.enqueue(leaders)
