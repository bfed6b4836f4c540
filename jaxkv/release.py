"""Gives back what a request holds, in the order in which it may be evicted."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxkv.cache_manager import KVCacheManager


def keep_end(cache: "KVCacheManager", row: int, *, resumes: bool) -> None:
    """The end of what a request computed becomes a boundary:
    a chat goes on there, if the eviction policy expects it, and a preempted request resumes.
    """
    hashes = cache.rows.info(row).request.block_hashes(cache.hasher)
    unit = cache.hasher.hash_block_size
    boundary = cache.lookup.replay_boundary(min(int(cache.rows.position[row]), len(hashes) * unit) + 1)
    if boundary and (resumes or cache.eviction.wants_end(hashes[boundary // unit - 1])):
        for manager in cache.retained_managers:
            manager.keep_boundary(row, hashes, boundary)


def free_row(cache: "KVCacheManager", row: int) -> None:
    """Lets go of all units of a row. Those that stay cached queue up as the eviction policy says: usually
    with the end of the sequence first.

    Group by group would give up all of one group's blocks before any of the next one's, and with them every
    hit; interleaved by position, the hit only gets shorter.
    """
    pool, level = cache.pool, cache.eviction.level(cache, row)
    freed = [manager.close_row(row) for manager in cache.managers]
    num_ids = sum(len(units.leaders) * width for units, width in zip(freed, pool.widths, strict=True))
    pool.let_go(cache.eviction.order(freed), level, num_ids)
