"""Why a hit was not longer: what the prompt had in common with earlier ones, and what had become of it.

Of a prompt's tokens, in this order: the hit; tokens lost although an earlier request had computed them, by
the group that kept the hit from reaching them; tokens that no hit may reach (the rest of a block, and the
last token, which is always computed); tokens that nobody had computed. The parts sum to the prompt.
"""

from collections import Counter
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.cache_manager import KVCacheManager
from jaxkv.hits import PrefixHit
from jaxkv.managers import Manager
from jaxkv.managers.full import FullAttentionManager
from jaxkv.managers.positional import PositionalManager

Cause = Literal["evicted", "not kept"]


class Loss(NamedTuple):
    """Tokens that group `group` lost to `cause`.

    evicted: it was wanted, and its room was needed. not kept: the retention policy did not want it (windows
    inside a prompt, states at places where none was kept), so its room was given out first, if there ever was
    such a state.
    """

    group: int
    cause: Cause
    tokens: int


class LossFinder:
    """Remembers the wanted content that was evicted, and tells for each hit what it lacked."""

    def __init__(self) -> None:
        self._evicted: dict[int, set[bytes]] = {}

    def evicting(self, manager: Manager, leaders: NDArray[np.integer]) -> None:
        """Full attention keeps everything, so what it lacks was evicted; the others are remembered."""
        if isinstance(manager, FullAttentionManager):
            return
        wanted = leaders[manager.pool.strong[leaders]]
        if len(wanted):
            hashes = manager.pool.hash_of[wanted].tolist()
            self._evicted.setdefault(manager.number, set()).update(h for h in hashes if h is not None)

    def losses(self, cache: KVCacheManager, hashes: list[bytes], hit: PrefixHit, possible: int) -> list[Loss]:
        """By group and cause, where a hit of `possible` tokens could have been: they sum to what it lacks."""
        lost: Counter[tuple[int, Cause]] = Counter()
        limit = possible
        cacheable = [manager for manager in cache.managers if manager.cacheable]
        full = [manager for manager in cacheable if isinstance(manager, FullAttentionManager)]
        for manager in full:
            reach = max(hit.num_tokens, min(limit, hit.tokens_by_group[manager.group_ids[0]]))
            lost[manager.group_ids[0], "evicted"] += limit - reach
            limit = reach
        others = [manager for manager in cacheable if manager not in full]
        if limit > hit.num_tokens and others:
            limiting = min(others, key=lambda m: hit.tokens_by_group[m.group_ids[0]])
            group = limiting.group_ids[0]
            kept = max(hit.num_tokens, self._once_kept(limiting, hashes, hit.num_tokens, limit))
            lost[group, "evicted"] += kept - hit.num_tokens
            lost[group, "not kept"] += limit - kept
        elif limit > hit.num_tokens:
            lost[cacheable[0].group_ids[0], "evicted"] += limit - hit.num_tokens
        return [Loss(group, cause, tokens) for (group, cause), tokens in lost.items() if tokens]

    def _once_kept(self, manager: Manager, hashes: list[bytes], shortest: int, limit: int) -> int:
        """The longest hit up to `limit` and above `shortest` that the manager could serve if nothing wanted
        had been evicted; 0: none.
        """
        evicted, units = self._evicted.get(manager.number, set()), manager.index.units
        unit, step = manager.context.hash_block_size, manager.context.alignment
        if not isinstance(manager, PositionalManager):
            lengths = range(limit // step * step, shortest, -step)
            return next((n for n in lengths if hashes[n // unit - 1] in evicted), 0)
        size = manager.block_size
        length = limit // step * step
        while length > shortest:
            for block in range(manager.first_needed(length) // size, length // size):
                key = hashes[(block + 1) * size // unit - 1]
                if key not in evicted and key not in units:
                    # Every length that needs this block is ruled out.
                    length = min(length - step, block * size // step * step)
                    break
            else:
                return length
        return 0
