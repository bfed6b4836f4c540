"""Room for the next tokens of one request: what it needs, whether that fits, and the taking of it."""

from collections.abc import Sequence
from operator import mul
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

    def check(self) -> None:
        """Raises JaxkvError for what are no counts."""
        new, lookahead, external, encoder = self
        if not (type(new) is type(lookahead) is type(external) is type(encoder) is int and min(self) >= 0):
            for name, count in zip(self._fields, self, strict=True):
                check_int(name, count, 0)


def allocate_slots(
    cache: "KVCacheManager",
    request: CacheRequest,
    counts: SlotCounts,
    hit: PrefixHit | None,
    *,
    delay_cache_blocks: bool,
) -> Allocation | None:
    """See KVCacheManager.allocate_slots."""
    counts.check()
    row = cache.find_row(request)
    if row < 0:
        return _start(cache, request, counts, hit, delay_cache_blocks=delay_cache_blocks)
    span = _next_span(cache, request, counts, hit, row)
    cache.upkeep.let_go(row, span.computed)
    needed = [manager.units_needed(row, NO_PART, span) for manager in cache.managers]
    taken = sum(map(mul, needed, cache.pool.widths))
    if taken > cache.pool.num_free and taken > cache.num_free_blocks:
        return None
    if delay_cache_blocks:
        cache.upkeep.delayed.add(row)
    _take(cache, row, needed, taken, span)
    return Allocation(row, taken)


def _start(
    cache: "KVCacheManager",
    request: CacheRequest,
    counts: SlotCounts,
    hit: PrefixHit | None,
    *,
    delay_cache_blocks: bool,
) -> Allocation | None:
    """Room for the first tokens of a request."""
    if hit is not None:
        check_is("hit", hit, PrefixHit)
    if counts.num_encoder_tokens > cache.plan.limits.max_encoder_len:
        raise JaxkvError(
            f"request {request.request_id!r} has {counts.num_encoder_tokens} encoder tokens, the plan is "
            f"made for at most {cache.plan.limits.max_encoder_len}"
        )
    hit = cache.lookup.nothing() if hit is None else cache.lookup.renew(request, hit)
    span, parts = _first_span(cache, request, counts, hit)
    # Units of the hit that other rows have left behind are to be counted as free.
    cache.upkeep.catch_up()
    needed = [
        manager.units_needed(-1, part, span) for manager, part in zip(cache.managers, parts, strict=True)
    ]
    taken = sum(map(mul, needed, cache.pool.widths))
    if taken + _free_in(cache, parts) > cache.num_free_blocks:
        return None
    row = _open(cache, request, parts, span)
    if cache.enable_caching:
        cache.record_admission(request, hit, parts)
    if delay_cache_blocks:
        cache.upkeep.delayed.add(row)
    _take(cache, row, needed, taken, span)
    for manager, part in zip(cache.managers, parts, strict=True):
        if part.copy_from >= 0:
            cache.copies.add(manager, part.copy_from, manager.ids_at(row, part.length))
    return Allocation(row, taken)


def _take(cache: "KVCacheManager", row: int, needed: list[int], taken: int, span: Span) -> None:
    """Gives the row the units it needs, by manager, `taken` ids in all, and caches what its step fills."""
    cache.pool.make_room(taken, needed)
    for manager, num_units in zip(cache.managers, needed, strict=True):
        if num_units:
            manager.extend(row, num_units, span)
    cache.upkeep.advance(row, span.computed, span.after)


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
    if hit is not None:
        check_is("hit", hit, PrefixHit)
    if counts.num_external_tokens or (hit is not None and hit.num_tokens):
        raise JaxkvError(f"request {request.request_id!r} already has blocks: it cannot start from a hit")
    computed = request.num_computed_tokens
    if computed > cache.rows.position.item(row):
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
    info = Row(
        request=request,
        boundaries=span.boundaries,
        window_boundaries=cache.eviction.with_lower(span.boundaries, cache.chunk_alignment),
        start=span.computed,
    )
    row = cache.rows.open(request.request_id, info)
    for manager, part in zip(cache.managers, parts, strict=True):
        manager.open_row(row, part, span)
        if part.copy_from >= 0:
            cache.copies.hold(manager, part.copy_from)
    return row
