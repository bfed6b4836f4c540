"""One more token for many rows at once: the steady step of decoding."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.checks import check_int, int_array
from jaxkv.errors import JaxkvError
from jaxkv.managers import NO_PART, Span

if TYPE_CHECKING:
    from jaxkv.cache_manager import KVCacheManager


class DecodeAllocation(NamedTuple):
    """num_done: leading rows that have room for their tokens; the next one did not fit.

    num_visited: rows that were looked at one by one, because they needed a block.
    """

    num_done: int
    num_visited: int


def allocate_decodes(
    cache: "KVCacheManager",
    rows: NDArray[np.integer],
    num_tokens_after: NDArray[np.integer],
    num_lookahead_tokens: int,
) -> DecodeAllocation:
    """See KVCacheManager.allocate_decodes."""
    rows, after = int_array("rows", rows), int_array("num_tokens_after", num_tokens_after)
    check_int("num_lookahead_tokens", num_lookahead_tokens, 0)
    if len(rows) != len(after):
        raise JaxkvError(f"{len(rows)} rows need as many token counts, not {len(after)}")
    if not len(rows):
        return DecodeAllocation(0, 0)
    capacity, position = cache.rows.capacity, cache.rows.position
    # Seen without their sign, negative rows are too large as well.
    if int(np.maximum.reduce(rows.view(np.uintp))) >= len(capacity):
        raise JaxkvError(
            f"rows {rows.min()} to {rows.max()} are not all in the table of {len(capacity)} rows"
        )
    wrong = after != position[rows] + 1
    if np.count_nonzero(wrong):
        _refuse(cache, int(rows[wrong][0]), int(after[wrong][0]))
    if len(rows) > 1 and not cache.rows.are_different(rows):
        raise JaxkvError(f"a row stands twice among the {len(rows)} rows: each gets one token")
    slots = after
    if num_lookahead_tokens:
        longest = cache.plan.max_model_len
        slots = np.minimum(after + min(num_lookahead_tokens, longest), np.maximum(after, longest))
    (due,) = (slots > capacity[rows]).nonzero()
    done = len(rows)
    if len(due):
        most = int(after[due].max())
        if most > cache.plan.max_model_len:
            raise JaxkvError(f"{most} tokens are more than the maximum of {cache.plan.max_model_len}")
        fitting = _give_blocks(cache, rows, after, slots, due)
        if fitting < len(due):
            done = int(due[fitting])
        due = due[:fitting]
    cache.upkeep.advance_rows(rows[:done], after[:done], rows[due])
    return DecodeAllocation(done, len(due))


def _refuse(cache: "KVCacheManager", row: int, after: int) -> None:
    position = int(cache.rows.position[row])
    if not position:
        raise JaxkvError(f"row {row} holds no request")
    raise JaxkvError(f"row {row} has room for {position} tokens and gets one more: it cannot have {after}")


def _give_blocks(
    cache: "KVCacheManager",
    rows: NDArray[np.intp],
    after: NDArray[np.int64],
    slots: NDArray[np.int64],
    due: NDArray[np.intp],
) -> int:
    """Blocks for the leading ones of the rows at indices `due`, as many as fit; returns their number."""
    if len(due) == 1:
        return _give_one(cache, rows, after, int(due[0]), int(slots[due[0]]))
    due_rows, due_after, due_slots = rows[due], after[due], slots[due]
    # What the rows completed is cached before anything of it is let go of.
    cache.upkeep.cache_rows(due_rows)
    for manager in cache.managers:
        if manager.gives_back:
            manager.release_rows(due_rows, due_after - 1)
    needed = [manager.needed_rows(due_rows, due_after, due_slots) for manager in cache.managers]
    blocks = sum(n * manager.width for n, manager in zip(needed, cache.managers, strict=True))
    running_sum = np.cumsum(blocks)
    if int(running_sum[-1]) > cache.pool.num_free:
        # Rows that need no block leave some behind too; they are asked only now that it matters.
        cache.upkeep.let_go_rows(rows, after - 1)
    fitting = int(np.searchsorted(running_sum, cache.pool.num_free, side="right"))
    if fitting:
        cache.pool.make_room(int(running_sum[fitting - 1]))
    for manager, units in zip(cache.managers, needed, strict=True):
        manager.extend_rows(due_rows[:fitting], units[:fitting], due_after[:fitting])
    return fitting


def _give_one(
    cache: "KVCacheManager", rows: NDArray[np.intp], after: NDArray[np.int64], index: int, slots: int
) -> int:
    """`_give_blocks` for the row at `index` alone, which is quicker without arrays of one element."""
    row, num_after = int(rows[index]), int(after[index])
    cache.upkeep.cache_row(row)
    for manager in cache.managers:
        if manager.gives_back:
            manager.release_skipped(row, num_after - 1)
    span = Span(num_after - 1, num_after, slots)
    needed = [manager.units_needed(row, NO_PART, span) for manager in cache.managers]
    taken = sum(n * manager.width for n, manager in zip(needed, cache.managers, strict=True))
    if taken > cache.pool.num_free:
        cache.upkeep.let_go_rows(rows, after - 1)
        if taken > cache.pool.num_free:
            return 0
    cache.pool.make_room(taken)
    for manager, units in zip(cache.managers, needed, strict=True):
        if units:
            manager.extend(row, units, span)
    return 1
