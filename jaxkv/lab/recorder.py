"""What a replay's cache decided: counters, and a digest over every decision."""

import hashlib
import struct
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jaxkv.cache_manager import KVCacheManager
from jaxkv.cache_request import CacheRequest
from jaxkv.hits import PrefixHit
from jaxkv.lab.content import SeenPrefixes, Tokens
from jaxkv.lab.flops import ModelCost
from jaxkv.lab.losses import LossFinder
from jaxkv.lab.request import ReplayRequest
from jaxkv.managers import MambaManager, Manager
from jaxkv.specs import cdiv

_HEAD = struct.Struct("<ii")


@dataclass
class HitCounts:
    """Over all requests that were admitted, once each; tokens of prompts.

    hits, never_computed, granularity and the values of lost sum to `queries`. lost: by group and cause.
    query_blocks: hash blocks that prompts touch. could_serve: by group, what it could have served by itself.
    recomputed: tokens that were computed although they had been before, with the FLOPs of them;
    saved_flops: those of the hits. resumed: admissions after a preemption, with tokens known and hit.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    query_blocks: int = 0
    hit_blocks: int = 0
    never_computed: int = 0
    granularity: int = 0
    lost: Counter[tuple[int, str]] = field(default_factory=Counter)
    could_serve: Counter[int] = field(default_factory=Counter)
    recomputed: int = 0
    recomputed_flops: int = 0
    saved_flops: int = 0
    resumed: int = 0
    resumed_tokens: int = 0
    resumed_hits: int = 0


class Recorder:
    """A cache's observer. `attach` it to the cache before the first request.

    evicted: by manager, units that lost content which the retention policy wanted (True) or did not.
    manager_groups: the first group of each manager. hits_by_serial: tokens, by request.
    """

    def __init__(self, cost: ModelCost | None) -> None:
        self.counts = HitCounts()
        self.evicted: Counter[tuple[int, bool]] = Counter()
        self.manager_groups: tuple[int, ...] = ()
        self.hits_by_serial: dict[int, int] = {}
        self._cost = cost
        self._digest = hashlib.sha256()
        self._losses = LossFinder()
        self._seen = SeenPrefixes()
        self._cache: KVCacheManager | None = None

    def attach(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self.manager_groups = tuple(manager.group_ids[0] for manager in cache.managers)

    @property
    def digest(self) -> str:
        """Over hits, evictions and the units that each request ended with: 64 hexadecimal digits."""
        return self._digest.hexdigest()

    # The cache's side

    def admitted(self, request: CacheRequest, hit: PrefixHit) -> None:
        assert isinstance(request, ReplayRequest)
        assert self._cache is not None
        numbers = [request.serial, request.num_preemptions, hit.num_tokens, *hit.tokens_by_group]
        self._digest.update(b"hit" + np.array(numbers, "<i8").tobytes())
        if request.num_preemptions:
            self.counts.resumed += 1
            self.counts.resumed_tokens += request.num_tokens
            self.counts.resumed_hits += hit.num_tokens
            self._recomputed(hit.num_tokens, request.num_computed_before)
            return
        self._count(self._cache, request, hit)

    def evicting(self, manager: Manager, leaders: NDArray[np.integer]) -> None:
        self._digest.update(b"evict" + _bytes(manager, leaders))
        num_strong = int(np.count_nonzero(manager.pool.strong[leaders]))
        self.evicted[manager.number, True] += num_strong
        self.evicted[manager.number, False] += len(leaders) - num_strong
        self._losses.evicting(manager, leaders)

    def freeing(self, request: CacheRequest, row: int) -> None:
        assert isinstance(request, ReplayRequest)
        assert self._cache is not None
        self._digest.update(
            b"free" + np.array([request.serial, request.num_computed_tokens], "<i8").tobytes()
        )
        for manager in self._cache.managers:
            self._digest.update(_bytes(manager, manager.units_of(row)))
        request.num_computed_before = request.num_computed_tokens
        if isinstance(request.traced.content, Tokens):
            computed = self._cache.hasher.num_hash_blocks(request.num_computed_tokens)
            self._seen.add(request.block_hashes(self._cache.hasher)[:computed])

    def finish(self) -> None:
        """Nothing more is counted, and the cache, which is of no more use, is let go of."""
        self._cache = None

    # Counting

    def _count(self, cache: KVCacheManager, request: ReplayRequest, hit: PrefixHit) -> None:
        counts, content, hasher = self.counts, request.traced.content, cache.hasher
        num_tokens, keys = request.num_prompt_tokens, content.keys(hasher)
        num_known = self._seen.shared(keys)
        self._seen.add(keys[num_known:])
        shared = max(hit.num_tokens, min(num_known * content.unit(hasher), num_tokens))
        possible = min(shared, num_tokens - 1) // cache.chunk_alignment * cache.chunk_alignment
        possible = max(possible, hit.num_tokens)
        self.hits_by_serial[request.serial] = hit.num_tokens
        counts.requests += 1
        counts.queries += num_tokens
        counts.hits += hit.num_tokens
        counts.query_blocks += cdiv(num_tokens, hasher.hash_block_size)
        counts.hit_blocks += hit.num_tokens // hasher.hash_block_size
        counts.never_computed += num_tokens - shared
        counts.granularity += shared - possible
        for group, tokens in enumerate(hit.tokens_by_group):
            counts.could_serve[group] += tokens
        if possible > hit.num_tokens:
            hashes = request.block_hashes(hasher)
            for loss in self._losses.losses(cache, hashes, hit, possible):
                counts.lost[loss.group, loss.cause] += loss.tokens
        self._recomputed(hit.num_tokens, shared)
        if self._cost is not None:
            counts.saved_flops += self._cost.of_tokens(0, hit.num_tokens)

    def _recomputed(self, start: int, stop: int) -> None:
        if stop > start:
            self.counts.recomputed += stop - start
            if self._cost is not None:
                self.counts.recomputed_flops += self._cost.of_tokens(start, stop)

    def states_kept(self) -> int:
        """Recurrent states in the cache now, all of a checkpoint's layers counted as one."""
        if self._cache is None:
            return 0
        states = [manager for manager in self._cache.managers if isinstance(manager, MambaManager)]
        return sum(len(manager.index) for manager in states)


def _bytes(manager: Manager, leaders: NDArray[np.integer]) -> bytes:
    return _HEAD.pack(manager.number, len(leaders)) + leaders.astype("<i4").tobytes()
