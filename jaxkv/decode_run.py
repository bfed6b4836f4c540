"""Many decode steps at once, for simulations: nothing happens between them."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jaxkv.decode_allocation import allocate_decodes
from jaxkv.managers import NO_PART, PositionalManager, Span
from jaxkv.managers.private import PrivateManager
from jaxkv.specs import cdiv

if TYPE_CHECKING:
    from jaxkv.cache_manager import KVCacheManager


def count_decodes(
    cache: "KVCacheManager", rows: NDArray[np.intp], computed: NDArray[np.int64], most: int
) -> int:
    """Does up to `most` steps of `allocate_decodes` for rows of so many computed tokens, if no row can be
    left without a block: all those up to the next one in which a row takes a block, or that one.
    Returns how many.
    """
    lookahead = cache.plan.limits.num_lookahead_tokens
    room = int((cache.rows.capacity[rows] - computed).min()) - lookahead
    steps = min(most, max(1, room))
    if room <= 0 and cache.pool.num_free < len(rows) * sum(cache.pool.widths):
        return 0
    cache.clock.step += steps
    cache.copies.release_sources()
    if room > 0:
        cache.upkeep.advance_rows(rows, computed + steps, rows[:0])
    else:
        allocate_decodes(cache, rows, computed + 1, lookahead)
    return steps


def can_run(cache: "KVCacheManager", row: int, num_steps: int) -> bool:
    """Whether `run_decodes` may do so many steps of the row: every one surely finds room, and nobody can tell
    when the blocks that they fill are cached.

    Not where states are kept or hits end inside blocks, whose content is worth something at one step only.
    """
    context = cache.managers[0].context
    is_watched = context.events is not None or context.residency is not None or context.computed.are_wanted
    if is_watched or row in cache.upkeep.delayed or not all(map(_waits, cache.managers)):
        return False
    most = sum(manager.width * (cdiv(num_steps, manager.block_size) + 1) for manager in cache.managers)
    return most <= cache.pool.num_free


def _waits(manager: object) -> bool:
    if isinstance(manager, PositionalManager):
        return not manager.context.fine_grained
    return isinstance(manager, PrivateManager)


def run_decodes(cache: "KVCacheManager", row: int, computed: int, num_steps: int) -> None:
    """Takes the row, which has `computed` tokens, through `num_steps` steps of `allocate_decodes`, each with
    a `new_step_starts` before it: the same blocks are let go of, evicted and taken in the same order.

    The request must know the tokens up to the last step already. What they fill is cached before any of it is
    let go of, and otherwise when it is next asked for. `can_run` must hold.
    """
    rows, pool, clock, managers = cache.rows, cache.pool, cache.clock, cache.managers
    giving_back = [m for m in managers if m.gives_back and isinstance(m, PositionalManager)]
    longest, lookahead = cache.plan.max_model_len, cache.plan.limits.num_lookahead_tokens
    cache.copies.release_sources()
    first_step, start, end = clock.step, computed, computed + num_steps
    reach = rows.capacity.item(row)
    # The step after `before` tokens needs room for `before` + 1 and the look-ahead.
    while (before := max(start, reach - lookahead)) < end and reach < longest:
        clock.step = first_step + before + 1 - start
        if any(m.first_skipped(before) > m.cached.item(row) for m in giving_back):
            rows.position[row], rows.last_step[row] = before, clock.step - 1
            cache.upkeep.cache_row(row)
        for manager in giving_back:
            manager.release_skipped(row, before)
        span = Span(before, before + 1, min(before + 1 + lookahead, longest))
        needed = [manager.units_needed(row, NO_PART, span) for manager in managers]
        pool.make_room(sum(n * manager.width for n, manager in zip(needed, managers, strict=True)))
        for manager, units in zip(managers, needed, strict=True):
            if units:
                manager.extend(row, units, span)
        reach = min(manager.capacity(row) for manager in managers)
    clock.step = first_step + num_steps
    visited = np.array([row])
    cache.upkeep.advance_rows(visited, np.array([end]), visited)
