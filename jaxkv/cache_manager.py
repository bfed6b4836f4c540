"""KVCacheManager: what a scheduler calls. Looks prompts up, gives out blocks, caches and frees them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxkv.cache_checks import check_plan
from jaxkv.cache_request import CacheRequest, check_request
from jaxkv.checks import check_bool, check_int, check_is
from jaxkv.copies import BlockCopies, PendingCopies
from jaxkv.decode_allocation import DecodeAllocation, allocate_decodes
from jaxkv.errors import JaxkvError
from jaxkv.events import EventLog, KVCacheEvent
from jaxkv.eviction import DEFAULT_POLICY, EvictionPolicy, make_eviction_policy
from jaxkv.hashing import BlockHasher, make_hasher
from jaxkv.hits import PrefixHit
from jaxkv.integrity import check_integrity
from jaxkv.lookup import PrefixLookup
from jaxkv.managers import (
    ComputedUnits,
    HitPart,
    MambaManager,
    ManagerContext,
    StepClock,
    make_managers,
)
from jaxkv.managers.full import FullAttentionManager
from jaxkv.metrics import PrefixCacheStats, Residency, ResidencySampler
from jaxkv.observer import CacheObserver
from jaxkv.planning.plan import CachePlan
from jaxkv.pool import MAX_BLOCKS, BlockPool
from jaxkv.release import free_row, keep_end
from jaxkv.retention import Retention
from jaxkv.rows import CacheRows
from jaxkv.slot_allocation import Allocation, SlotCounts, allocate_slots
from jaxkv.specs import FullAttentionSpec
from jaxkv.upkeep import Upkeep


class KVCacheManager:
    """Owns the block pool of one plan and the tables of all requests that hold blocks.

    A request gets a row of the tables with its first `allocate_slots` and keeps it until `free`. Every block
    is cached as soon as it is full, and what a window or a recurrent state leaves behind is free at once:
    rows that `allocate_decodes` did not have to look at catch up before anything could tell the difference.

    plan: from jaxkv.planning. enable_caching: off, no block is ever shared.
    hash_algo: a name of jaxkv.hashing.HASHERS.
    retention_interval: 0 sparse, n tokens periodic, None dense; see jaxkv.retention.
    eviction: a policy of this cache alone, or the name of one in jaxkv.eviction.POLICIES.
    prefix_match_unit: hits may end inside a block, at any multiple of this (the plan's hash block); the block
    is then copied (`take_block_copies`). None: whole blocks only.
    num_hash_lookahead_tokens: tokens after a block that its hash covers too. Above 0, EAGLE groups need no
    block after the hit, because the hash already proves what the draft model read.
    enable_kv_cache_events: collect events for `take_events`. residency_sampling: part of the blocks to
    follow. observer: told of every decision.
    max_num_seqs: rows to start with; they grow by doubling.

    Raises JaxkvError for groups that cannot be served together, with the values.
    """

    def __init__(
        self,
        plan: CachePlan,
        *,
        enable_caching: bool = True,
        hash_algo: str = "sha256",
        retention_interval: int | None = 0,
        eviction: EvictionPolicy | str = DEFAULT_POLICY,
        prefix_match_unit: int | None = None,
        num_hash_lookahead_tokens: int = 0,
        enable_kv_cache_events: bool = False,
        residency_sampling: float = 0.0,
        observer: CacheObserver | None = None,
        max_num_seqs: int = 128,
    ) -> None:
        check_is("plan", plan, CachePlan)
        check_int("max_num_seqs", max_num_seqs, 1, MAX_BLOCKS)
        check_bool("enable_caching", enable_caching)
        check_bool("enable_kv_cache_events", enable_kv_cache_events)
        drop_eagle_block = num_hash_lookahead_tokens == 0
        check_plan(
            plan,
            enable_caching=enable_caching,
            prefix_match_unit=prefix_match_unit,
            drop_eagle_block=drop_eagle_block,
        )
        fine_grained = prefix_match_unit is not None
        self.plan = plan
        self.enable_caching = enable_caching
        self.hasher: BlockHasher = make_hasher(hash_algo, plan.hash_block_size, num_hash_lookahead_tokens)
        self.chunk_alignment = plan.hash_block_size if fine_grained else plan.whole_block_alignment
        self.eviction = make_eviction_policy(eviction) if isinstance(eviction, str) else eviction
        self.retention = Retention(retention_interval, self.chunk_alignment)
        if enable_caching:
            self.retention.check()
        self.clock = StepClock()
        self.computed = ComputedUnits()
        self.pool = BlockPool(
            plan.num_blocks,
            unwanted_first=self.eviction.unwanted_first,
            num_levels=self.eviction.num_levels,
        )
        self._events = EventLog() if enable_kv_cache_events else None
        self._residency = ResidencySampler(residency_sampling) if residency_sampling != 0.0 else None
        self._observer = observer
        limits = plan.limits
        context = ManagerContext(
            pool=self.pool,
            retention=self.retention,
            clock=self.clock,
            hash_block_size=plan.hash_block_size,
            alignment=self.chunk_alignment,
            fine_grained=fine_grained,
            enable_caching=enable_caching,
            computed=self.computed,
            events=self._events,
            residency=self._residency,
            observer=observer,
            keeps_unwanted=self.eviction.keeps_unwanted,
        )
        self.managers = tuple(
            make_managers(
                plan.groups,
                context,
                drop_eagle_block=drop_eagle_block,
                context_parallel_size=limits.decode_context_parallel_size,
            )
        )
        self.lookup = PrefixLookup(
            self.managers, len(plan.groups), self.pool, self.hasher, self.chunk_alignment
        )
        self.coordinator = self.lookup.coordinator
        self.rows = CacheRows(self.managers, max_num_seqs, plan.max_model_len)
        self.copies = PendingCopies()
        self.prefix_cache_stats = PrefixCacheStats()
        self.upkeep = Upkeep(self.rows, self.managers, self.clock, self.hasher)
        # Full attention wants every block anyway.
        self.retained_managers = [
            m for m in self.managers if m.cacheable and not isinstance(m.spec, FullAttentionSpec)
        ]
        self.full_managers = [m for m in self.managers if m.cacheable and isinstance(m, FullAttentionManager)]
        self.eviction.attach(self)
        self._keeps_states = any(m.cacheable and isinstance(m, MambaManager) for m in self.managers)
        # Then a row may have something to cache between the points that `rows.cache_at` tells.
        self._caches_inside_blocks = self._keeps_states or fine_grained

    # Looking up

    def get_computed_blocks(self, request: CacheRequest) -> PrefixHit:
        """The longest cached prefix of the request's known tokens, at most all but one of them.
        Changes nothing.
        """
        check_request(request)
        if not self.enable_caching:
            return self.lookup.nothing()
        self.upkeep.catch_up_caching()
        return self.lookup.find(request)

    def checkpoint_positions(self, request: CacheRequest, hit: PrefixHit | None = None) -> Sequence[int]:
        """Positions at which a prefill chunk must end, because a recurrent state is to be kept there.

        `hit`: the look-up of a request that has no row yet. Empty for models without recurrent layers.
        """
        if not self._keeps_states:
            return ()
        row = self.find_row(request)
        if row >= 0:
            start, boundaries = request.num_computed_tokens, self.rows.info(row).boundaries
        else:
            start = hit.num_tokens if hit is not None else 0
            boundaries = self.lookup.boundaries(request, hit)
        return self.retention.wanted_between(start, request.num_tokens + 1, boundaries)

    # Giving out

    def allocate_slots(
        self,
        request: CacheRequest,
        num_new_tokens: int,
        *,
        hit: PrefixHit | None = None,
        num_lookahead_tokens: int = 0,
        num_external_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
    ) -> Allocation | None:
        """Room for `num_new_tokens` more tokens of a request. None if it does not fit: nothing is given out
        then.

        A request without blocks starts with its `hit` and `num_external_tokens` further tokens whose content
        somebody else brings (a connector); all groups' hit blocks are held before any new block is taken. A
        running request goes on from its num_computed_tokens; blocks that its windows have left behind are
        freed first, whether or not the rest fits. The tokens' blocks are cached as they fill, up to the known
        tokens, unless `delay_cache_blocks` leaves that to a later `cache_blocks` (content that is still on
        its way).

        num_lookahead_tokens: further slots for drafts. num_encoder_tokens: for cross attention, at the start.
        Raises JaxkvError for negative counts, more tokens than max_model_len, more computed tokens than there
        was room for, another request's id, a hit for a request that already has blocks, a hit that is not of
        this prompt and this cache, a hit whose blocks have been given out since.
        """
        counts = SlotCounts(num_new_tokens, num_lookahead_tokens, num_external_tokens, num_encoder_tokens)
        return allocate_slots(self, request, counts, hit, delay_cache_blocks=delay_cache_blocks)

    def allocate_decodes(
        self,
        rows: NDArray[np.integer],
        num_tokens_after: NDArray[np.integer],
        *,
        num_lookahead_tokens: int = 0,
    ) -> DecodeAllocation:
        """One more token for each of int[n] different rows, which then have int[n] `num_tokens_after` tokens.

        Equal to `allocate_slots` row by row, in order, up to the first row that does not fit: the rows before
        it are done, it and the later ones keep what they had. Looks only at rows that need a block.
        Raises JaxkvError, and changes nothing, for rows without a request, for more or less than one token,
        and beyond max_model_len.
        """
        return allocate_decodes(self, rows, num_tokens_after, num_lookahead_tokens)

    def rewind(self, rows: NDArray[np.integer], num_tokens: NDArray[np.integer]) -> None:
        """The last step of int[n] rows computed drafts that turned out wrong: only int[n] `num_tokens` stand.

        The slots stay with the rows and are written over by what comes next; the step's state must then be
        the one after `num_tokens` tokens. To be called before the request knows the right tokens. Raises
        JaxkvError, and changes nothing, unless every row's last step ran from below `num_tokens` to at least
        `num_tokens`.
        """
        self.upkeep.rewind(rows, num_tokens)

    def record_admission(self, request: CacheRequest, hit: PrefixHit, parts: Sequence[HitPart]) -> None:
        """Counts the look-up of a request that has just got its first blocks, and tells who wants to know.

        parts: what of the hit it holds.
        """
        self.prefix_cache_stats.record(
            request.num_tokens, hit, preempted=request.num_preemptions > 0, alignment=self.chunk_alignment
        )
        if self._residency is not None:
            for part in parts:
                self._residency.hit(part.leaders, self.clock.step)
        self.eviction.admitted(self, request, parts)
        if self._observer is not None:
            self._observer.admitted(request, hit)

    # Caching

    def cache_blocks(self, request: CacheRequest, num_computed_tokens: int) -> None:
        """Caches what the first `num_computed_tokens` tokens filled, and all later ones as they fill.

        For content that was put off with `delay_cache_blocks` and has arrived.
        """
        self.upkeep.arrived(self._row_with(request, num_computed_tokens), num_computed_tokens)

    # Letting go

    def remove_skipped_blocks(self, request: CacheRequest, num_computed_tokens: int) -> None:
        """Frees blocks that no token after the first `num_computed_tokens` reads."""
        self.upkeep.let_go(self._row_with(request, num_computed_tokens), num_computed_tokens)

    def free(self, request: CacheRequest, *, resumes: bool = False) -> None:
        """Gives back all blocks of a request; nothing to do for one that has none.

        What it cached stays until the room is needed: the blocks of its end go first, over all groups, so
        that what is left still serves a hit. The last boundary it reached is kept as one where a request may
        resume.
        """
        row = self.find_row(request)
        if row >= 0:
            hashes = request.block_hashes(self.hasher) if self.enable_caching else []
            if self._caches_inside_blocks or self.rows.position.item(row) >= self.rows.cache_at.item(row):
                self.upkeep.cache_row_of(row, hashes)
            if self.enable_caching and not self.retention.is_dense and row not in self.upkeep.delayed:
                keep_end(self, row, hashes, resumes=resumes)
            if self._observer is not None:
                self._observer.freeing(request, row)
            free_row(self, row, hashes)
            self.rows.close(request.request_id)
            self.upkeep.delayed.discard(row)

    def reset_prefix_cache(self) -> bool:
        """Forgets everything cached, and what the eviction policy learned from earlier requests: what follows
        is decided as in a new cache. False, and nothing forgotten, while any request holds blocks.
        """
        if len(self.rows) or self.copies.held() or self.computed:
            return False
        mark = self._events.mark() if self._events is not None else 0
        for manager in self.managers:
            self.pool.forget(manager.number, self.pool.cached_units(manager.number))
        self.eviction.forget()
        if self._events is not None:
            self._events.cleared(mark)
        return True

    # Steps

    def new_step_starts(self) -> None:
        """The steps given out so far will run before the one that is scheduled from now on.

        A scheduler calls this once a step. It tells states that a step may start from apart from states that
        the same step only computes; who never calls it takes every call for a step of its own.
        """
        self.clock.step += 1
        self.copies.release_sources()

    def take_block_copies(self) -> BlockCopies:
        """What the device must copy before the step being scheduled. Empties the list."""
        copies = self.copies.take()
        if self.clock.step == 0:
            self.copies.release_sources()
        return copies

    # Looking in

    @property
    def num_free_blocks(self) -> int:
        """Ids that could be given out now, cached ones that nobody holds included."""
        self.upkeep.catch_up()
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Part of the pool that requests hold, 0 to 1: vLLM's kv_cache_usage_perc."""
        return 1.0 - self.num_free_blocks / max(1, self.pool.num_blocks - 1)

    def usage_by_group(self) -> list[float]:
        """Part of the pool that each group's blocks take which requests hold; a shared block counts once."""
        self.upkeep.catch_up()
        usable = max(1, self.pool.num_blocks - 1)
        shares = [0.0] * len(self.plan.groups)
        rows = self.rows.active().tolist()
        for manager in self.managers:
            held = [manager.units_of(row) for row in rows]
            num_units = len(np.unique(np.concatenate(held))) if held else 0
            for group in manager.group_ids:
                shares[group] = num_units * manager.blocks_per_state / usable
        return shares

    def row_of(self, request_id: str) -> int:
        """The row of a request that holds blocks; JaxkvError for one that holds none."""
        return self._row(request_id)

    def _row(self, request_id: str) -> int:
        check_is("request_id", request_id, str)
        row = self.rows.find(request_id)
        if row < 0:
            raise JaxkvError(f"request {request_id!r} holds no blocks")
        return row

    def find_row(self, request: CacheRequest) -> int:
        """The request's row, or -1. JaxkvError for what is no request, and where another request of the same
        id has blocks.
        """
        check_request(request)
        row = self.rows.find(request.request_id)
        if row >= 0 and self.rows.info(row).request is not request:
            raise JaxkvError(f"another request with the id {request.request_id!r} holds blocks")
        return row

    def _row_with(self, request: CacheRequest, num_computed_tokens: int) -> int:
        """The row of a request that can have computed so many tokens."""
        check_int("num_computed_tokens", num_computed_tokens, 0)
        row = self.find_row(request)
        if row < 0:
            raise JaxkvError(f"request {request.request_id!r} holds no blocks")
        if num_computed_tokens > self.rows.position[row]:
            raise JaxkvError(
                f"request {request.request_id!r} has room for {self.rows.position[row]} tokens, so "
                f"{num_computed_tokens} cannot be computed"
            )
        return row

    def get_block_ids(self, request_id: str) -> list[list[int]]:
        """By group: the request's ids by block position, 0 where nothing is held."""
        row = self._row(request_id)
        self.upkeep.catch_up()
        tables: list[list[int]] = [[] for _ in self.plan.groups]
        for manager in self.managers:
            for group, ids in zip(manager.group_ids, manager.positional_ids(row), strict=True):
                tables[group] = ids
        return tables

    def take_events(self) -> list[KVCacheEvent]:
        """KV events since the last call; empty unless enabled."""
        if self._events is None:
            return []
        self.upkeep.catch_up_caching()
        return self._events.take()

    def take_residency(self) -> list[Residency]:
        """The lives of sampled blocks that ended since the last call."""
        return self._residency.take() if self._residency is not None else []

    def check_integrity(self) -> None:
        """Counts every block; raises IntegrityError where the accounts do not balance."""
        check_integrity(self)
