"""One more token for many rows at once: the steady step of decoding."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.errors import JaxkvError

if TYPE_CHECKING:
    from jaxkv.cache_manager import KVCacheManager


class DecodeAllocation(NamedTuple):
    """num_done: leading rows that have room for their tokens; the next one did not fit.

    num_visited: rows that were looked at one by one, because they needed a block.
    """

    num_done: int
    num_visited: int


def allocate_decodes(
    cache: "KVCacheManager", rows: NDArray[np.integer], num_tokens_after: NDArray[np.integer]
) -> DecodeAllocation:
    """See KVCacheManager.allocate_decodes."""
    after = np.asarray(num_tokens_after, np.int64)
    if len(rows) != len(after):
        raise JaxkvError(f"{len(rows)} rows need as many token counts, not {len(after)}")
    if not len(rows):
        return DecodeAllocation(0, 0)
    rows = np.asarray(rows, np.intp)
    capacity = cache.rows.capacity
    # Seen without their sign, negative rows are too large as well.
    if int(rows.view(np.uintp).max()) >= len(capacity):
        raise JaxkvError(
            f"rows {rows.min()} to {rows.max()} are not all in the table of {len(capacity)} rows"
        )
    (due,) = (after > capacity[rows]).nonzero()
    done = len(rows)
    if len(due):
        # A row without a request has no capacity, so it is among these.
        unused = rows[due][cache.rows.position[rows[due]] == 0]
        if len(unused):
            raise JaxkvError(f"row {unused[0]} holds no request")
        if len(set(rows[due].tolist())) < len(due):
            raise JaxkvError(f"a row stands twice among the {len(rows)} rows: each gets one token")
        most = int(after[due].max())
        if most > cache.plan.max_model_len:
            raise JaxkvError(f"{most} tokens are more than the maximum of {cache.plan.max_model_len}")
        fitting = _give_blocks(cache, rows, after, due)
        if fitting < len(due):
            done = int(due[fitting])
        due = due[:fitting]
    cache.upkeep.advance_rows(rows[:done], after[:done], rows[due])
    return DecodeAllocation(done, len(due))


def _give_blocks(
    cache: "KVCacheManager", rows: NDArray[np.intp], after: NDArray[np.int64], due: NDArray[np.intp]
) -> int:
    """Blocks for the leading ones of the rows at indices `due`, as many as fit; returns their number."""
    due_rows, due_after = rows[due], after[due]
    # What the rows completed is cached before anything of it is let go of.
    cache.upkeep.cache_rows(due_rows)
    for manager in cache.managers:
        manager.release_rows(due_rows, due_after - 1)
    needed = [manager.needed_rows(due_rows, due_after) for manager in cache.managers]
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
