"""Gives back what a request holds, in the order in which it may be evicted."""

from operator import mul
from typing import TYPE_CHECKING

from jaxkv.pool import Units

if TYPE_CHECKING:
    from jaxkv.cache_manager import KVCacheManager


def keep_end(cache: "KVCacheManager", row: int, hashes: list[bytes], *, resumes: bool) -> None:
    """The end of what a request computed becomes a boundary: a chat goes on there, if the eviction policy
    expects it, and a preempted request resumes. What lies beyond the last boundary is of no use then.
    """
    info, unit = cache.rows.info(row), cache.hasher.hash_block_size
    known = min(cache.rows.position.item(row), len(hashes) * unit)
    end = cache.lookup.replay_boundary(known + 1)
    # An answer that fills no block ends where its prompt does: who goes on there goes on from the prompt.
    is_new = end > (info.boundaries[-1] if info.boundaries else 0)
    if is_new and (resumes or cache.eviction.wants_end(hashes[end // unit - 1])):
        info.boundaries = (*info.boundaries, end)
        for manager in cache.retained_managers:
            manager.keep_boundary(row, hashes, end)
    if cache.eviction.by_reach:
        last = cache.retention.last_wanted(known, info.boundaries)
        for manager in cache.full_managers:
            manager.unwant_beyond(row, last)


def free_row(cache: "KVCacheManager", row: int, hashes: list[bytes]) -> None:
    """Lets go of all units of a row. Those that stay cached queue up as the eviction policy says: usually
    with the end of the sequence first.

    Group by group would give up all of one group's blocks before any of the next one's, and with them every
    hit; interleaved by position, the hit only gets shorter.
    """
    pool, level = cache.pool, cache.eviction.level(cache, row)
    left = _left_behind(cache, row, hashes) if cache.eviction.by_reach else []
    held = [manager.close_row(row) for manager in cache.managers]
    num_ids = sum(map(mul, [len(units.leaders) for units in held], pool.widths))
    pool.let_go(cache.eviction.order([*held, *left]), level, num_ids)


def _left_behind(cache: "KVCacheManager", row: int, hashes: list[bytes]) -> list[Units]:
    """What serves the row's boundaries, the one it began from included, and was let go of while it ran: it is
    of use as long as the full attention below those boundaries is.
    """
    if not cache.retained_managers:
        return []
    info, step = cache.rows.info(row), cache.chunk_alignment
    longest = len(hashes) * cache.hasher.hash_block_size
    # A connector may have brought tokens up to any place.
    reached = sorted({info.start, *info.boundaries}, reverse=True)
    boundaries = [n for n in reached if 0 < n <= longest and n % step == 0]
    return [manager.left_behind(row, hashes, boundaries) for manager in cache.retained_managers]
