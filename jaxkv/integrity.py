"""Counts every block of a cache: the check that runs in tests and when an engine is idle."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxkv.cache_manager import KVCacheManager


class IntegrityError(RuntimeError):
    """The accounts of a cache do not balance: a bug of jaxkv, never of its user."""


def check_integrity(cache: "KVCacheManager") -> None:
    """Raises IntegrityError unless every block is accounted for exactly once.

    Every request has a row of its own, which knows how far it gets without work on it. Plain ids hold
    nothing; they, ids of free cached units and ids of held units partition the pool without the null block.
    Every reference count equals the number of holders; the index and the pool agree on what is cached, and on
    what is in it twice or in part; the free count is right.
    """
    pool = cache.pool
    fault = cache.rows.fault() or cache.rows.wrong_figure(cache.upkeep.delayed)
    if fault is not None:
        raise IntegrityError(fault)
    holders = np.zeros(pool.num_blocks, np.int64)
    owner = np.full(pool.num_blocks, -1, np.int64)
    for manager in cache.managers:
        for row in cache.rows.active().tolist():
            leaders = manager.units_of(row)
            np.add.at(holders, leaders, 1)
            owner[leaders] = manager.number
    for number, leader in [*cache.copies.held(), *cache.computed.held()]:
        holders[leader] += 1
        owner[leader] = number
    wrong = np.flatnonzero(holders != pool.refs)
    if len(wrong):
        block = int(wrong[0])
        raise IntegrityError(
            f"block {block} has reference count {pool.refs[block]} but {holders[block]} holders "
            f"({len(wrong)} blocks are wrong)"
        )
    num_further = int(np.maximum(holders - 1, 0).sum())
    if num_further != pool.num_further:
        raise IntegrityError(
            f"blocks have {num_further} further holders but the pool counts {pool.num_further}"
        )
    plain = pool.plain_ids()
    used = plain[pool.cached[plain] | (pool.holders[plain] != 0)]
    if len(used):
        raise IntegrityError(f"block {used[0]} is cached, held or queued, and plain ({len(used)} are wrong)")
    seen = np.zeros(pool.num_blocks, np.int64)
    seen[0] = 1
    np.add.at(seen, plain, 1)
    free = pool.free_units()
    num_free = len(plain)
    for leaders, is_free in ((free, True), (np.flatnonzero(holders).astype(np.int32), False)):
        for manager in cache.managers:
            number = manager.number
            of_manager = (
                (pool.cached & (pool.owner == number))[leaders] if is_free else owner[leaders] == number
            )
            ids = pool.members(number, leaders[of_manager]).ravel()
            np.add.at(seen, ids, 1)
            num_free += len(ids) if is_free else 0
    wrong = np.flatnonzero(seen != 1)
    if len(wrong):
        raise IntegrityError(
            f"block {wrong[0]} is accounted for {seen[wrong[0]]} times ({len(wrong)} are wrong)"
        )
    if num_free != pool.num_free:
        raise IntegrityError(f"{num_free} blocks are free but the pool counts {pool.num_free}")
    _check_index(cache)


def _check_index(cache: "KVCacheManager") -> None:
    pool = cache.pool
    for manager in cache.managers:
        cached = set(pool.cached_units(manager.number).tolist())
        for block_hash, leader in manager.index.units.items():
            if leader not in cached or pool.hash_of[leader] != block_hash:
                raise IntegrityError(
                    f"the index of manager {manager.number} points to block {leader}, not cached there"
                )
        for leader in cached:
            block_hash = pool.hash_of[leader]
            if block_hash is not None and block_hash not in manager.index.units:
                raise IntegrityError(
                    f"block {leader} is cached but the index of manager {manager.number} lacks it"
                )
        fault = manager.index.fault(cached)
        if fault is not None:
            raise IntegrityError(f"the index of manager {manager.number}: {fault}")
    unowned = [leader for leader in np.flatnonzero(~pool.cached).tolist() if pool.hash_of[leader]]
    if unowned:
        raise IntegrityError(f"block {unowned[0]} has a hash but is in no index")
