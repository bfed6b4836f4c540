"""Room for the next tokens of one request: what it needs, whether that fits, and the taking of it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxkv.cache_request import CacheRequest
from jaxkv.checks import check_int, check_is
from jaxkv.errors import JaxkvError
from jaxkv.hits import PrefixHit
from jaxkv.managers import NO_PART, HitPart, Row, Span

if TYPE_CHECKING:
    from jaxkv.cache_manager import KVCacheManager


class Allocation(NamedTuple):
    """A request's room for a step. row: of the block tables. num_new_blocks: ids taken for it."""

    row: int
    num_new_blocks: int


class SlotCounts(NamedTuple):
    """Tokens that a request wants room for; see KVCacheManager.allocate_slots."""

    num_new_tokens: int
    num_lookahead_tokens: int
    num_external_tokens: int
    num_encoder_tokens: int

    def check(self, cache: "KVCacheManager", request: CacheRequest) -> None:
        """Raises JaxkvError for negative counts and more encoder tokens than the plan is made for."""
        for index, count in enumerate(self):
            if type(count) is not int or count < 0:
                check_int(self._fields[index], count, 0)
        if self.num_encoder_tokens > cache.plan.limits.max_encoder_len:
            raise JaxkvError(
                f"request {request.request_id!r} has {self.num_encoder_tokens} encoder tokens, the plan is "
                f"made for at most {cache.plan.limits.max_encoder_len}"
            )


def allocate_slots(
    cache: "KVCacheManager",
    request: CacheRequest,
    counts: SlotCounts,
    hit: PrefixHit | None,
    *,
    delay_cache_blocks: bool,
) -> Allocation | None:
    """See KVCacheManager.allocate_slots."""
    counts.check(cache, request)
    if hit is not None:
        check_is("hit", hit, PrefixHit)
    row = cache.find_row(request)
    if row < 0:
        hit = cache.lookup.nothing() if hit is None else cache.lookup.renew(request, hit)
        span, parts = _first_span(cache, request, counts, hit)
        # Units of the hit that other rows have left behind are to be counted as free.
        cache.upkeep.catch_up()
    else:
        span, parts = _next_span(cache, request, counts, hit, row), ()
        cache.upkeep.let_go(row, span.computed)
    needed: list[int] = []
    taken = 0
    for manager in cache.managers:
        units = manager.units_needed(row, parts[manager.number] if parts else NO_PART, span)
        needed.append(units)
        taken += units * manager.width
    wanted = taken + (_free_in(cache, parts) if parts else 0)
    if wanted > cache.pool.num_free and wanted > cache.num_free_blocks:
        return None
    if row < 0:
        row = _open(cache, request, parts, span)
        if hit is not None and cache.enable_caching:
            cache.record_admission(request, hit, parts)
    cache.pool.make_room(taken)
    for manager in cache.managers:
        manager.extend(row, needed[manager.number], span)
    for manager, part in zip(cache.managers, parts, strict=False):
        if part.copy_from >= 0:
            cache.copies.add(manager, part.copy_from, manager.ids_at(row, part.length))
    if delay_cache_blocks:
        cache.upkeep.delayed.add(row)
    cache.upkeep.advance(row, span.computed, span.after)
    return Allocation(row, taken)


def _first_span(
    cache: "KVCacheManager", request: CacheRequest, counts: SlotCounts, hit: PrefixHit
) -> tuple[Span, tuple[HitPart, ...]]:
    """The first tokens of a request, and what of its hit is of use."""
    computed = hit.num_tokens + counts.num_external_tokens
    parts = tuple(m.trim(part, computed) for m, part in zip(cache.managers, hit.parts, strict=True))
    boundaries = cache.lookup.boundaries(request, hit) if cache.enable_caching else ()
    return _span(cache, request, counts, computed, boundaries), parts


def _next_span(
    cache: "KVCacheManager", request: CacheRequest, counts: SlotCounts, hit: PrefixHit | None, row: int
) -> Span:
    """The next tokens of a request that has blocks."""
    if counts.num_external_tokens or (hit is not None and hit.num_tokens):
        raise JaxkvError(f"request {request.request_id!r} already has blocks: it cannot start from a hit")
    computed = request.num_computed_tokens
    if computed > cache.rows.position[row]:
        raise JaxkvError(
            f"request {request.request_id!r} has {computed} computed tokens, but had room for "
            f"{cache.rows.position[row]} only"
        )
    return _span(cache, request, counts, computed, cache.rows.info(row).boundaries)


def _span(
    cache: "KVCacheManager",
    request: CacheRequest,
    counts: SlotCounts,
    computed: int,
    boundaries: tuple[int, ...],
) -> Span:
    after, longest = computed + counts.num_new_tokens, cache.plan.max_model_len
    if after == 0 or after > longest:
        raise JaxkvError(
            f"request {request.request_id!r} asks for room for {after} tokens; there must be at least 1 "
            f"and at most max_model_len {longest}"
        )
    slots = min(after + counts.num_lookahead_tokens, longest)
    return Span(computed, after, slots, boundaries, counts.num_encoder_tokens)


def _free_in(cache: "KVCacheManager", parts: Sequence[HitPart]) -> int:
    """Ids of the parts' units that nobody holds: they count as free until they are held."""
    total = 0
    for manager, part in zip(cache.managers, parts, strict=False):
        leaders = part.leaders
        if part.copy_from >= 0:
            leaders = np.append(leaders, np.int32(part.copy_from))
        total += cache.pool.count_free(leaders) * manager.width
    return total


def _open(cache: "KVCacheManager", request: CacheRequest, parts: Sequence[HitPart], span: Span) -> int:
    """A row that holds the hit's units. All are held before any other block is taken."""
    row = cache.rows.open(request.request_id, Row(request=request, boundaries=span.boundaries))
    for manager, part in zip(cache.managers, parts, strict=True):
        manager.open_row(row, part, span)
        if part.copy_from >= 0:
            cache.copies.hold(manager, part.copy_from)
    return row
