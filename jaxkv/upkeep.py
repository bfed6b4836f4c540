"""Keeps the accounts of running rows: caches what they complete, lets go of what they leave behind.

Rows that advance in a steady decode step are not looked at. They are caught up with before anything could
tell the difference: before a look-up, before the free blocks are counted, before a row's blocks are given
back.
"""

import numpy as np
from numpy.typing import NDArray

from jaxkv.checks import int_array
from jaxkv.errors import JaxkvError
from jaxkv.hashing import BlockHasher
from jaxkv.managers import NEVER, Filled, Manager, StepClock
from jaxkv.rows import CacheRows


class Upkeep:
    """delayed: rows whose content is still on its way, so that nothing of it may be cached."""

    def __init__(
        self, rows: CacheRows, managers: tuple[Manager, ...], clock: StepClock, hasher: BlockHasher
    ) -> None:
        self.delayed: set[int] = set()
        self._rows = rows
        self._managers = managers
        self._cacheable = [manager for manager in managers if manager.cacheable]
        self._giving_back = [manager for manager in managers if manager.gives_back]
        self._clock = clock
        self._hasher = hasher
        self._has_lazy_rows = False
        self._may_have_to_cache = False

    # After a step is scheduled

    def advance(self, row: int, computed: int, after: int) -> None:
        """The row's step takes it from `computed` to `after` tokens; what that fills is cached."""
        self._rows.computed[row], self._rows.position[row] = computed, after
        self._rows.last_step[row] = step = self._clock.step
        if self._cacheable and row not in self.delayed:
            self._cache(row, self._filled(row, after, after, step))
        self._refresh(row, after)

    def advance_rows(
        self, rows: NDArray[np.intp], after: NDArray[np.int64], visited: NDArray[np.intp]
    ) -> None:
        """One more token for each row. Only the rows `visited` have new blocks."""
        self._rows.computed[rows] = after - 1
        self._rows.position[rows] = after
        self._rows.last_step[rows] = self._clock.step
        self._has_lazy_rows = self._may_have_to_cache = True
        if len(visited) == 1:
            self._rows.refresh_one(int(visited[0]))
        elif len(visited):
            self._rows.refresh(visited)

    def rewind(self, rows: NDArray[np.integer], num_tokens: NDArray[np.integer]) -> None:
        """What the rows' last step computed after their first `num_tokens` tokens does not stand."""
        rows, num_tokens = int_array("rows", rows), int_array("num_tokens", num_tokens)
        if len(rows) != len(num_tokens):
            raise JaxkvError(f"{len(rows)} rows need as many token counts, not {len(num_tokens)}")
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(self._rows.position):
            raise JaxkvError(
                f"rows {rows.min()} to {rows.max()} are not all in the table of {len(self._rows.position)} "
                "rows"
            )
        computed, position = self._rows.computed[rows], self._rows.position[rows]
        wrong = (num_tokens <= computed) | (num_tokens > position)
        if wrong.any():
            index = int(wrong.argmax())
            raise JaxkvError(
                f"the last step of row {rows[index]} ran from {computed[index]} to {position[index]} tokens: "
                f"it cannot be taken back to {num_tokens[index]}"
            )
        self._rows.position[rows] = num_tokens
        for manager in self._managers:
            manager.rewind(rows, num_tokens)
        self._may_have_to_cache = True

    # Caching

    def cache_row(self, row: int) -> None:
        """Caches what the row has completed, unless that is put off."""
        self.cache_row_of(row, self._rows.info(row).request.block_hashes(self._hasher))

    def cache_row_of(self, row: int, hashes: list[bytes]) -> None:
        """`cache_row` where the request's hashes are at hand."""
        if self._cacheable and row not in self.delayed:
            position, info = self._rows.position.item(row), self._rows.info(row)
            if info.looked_at != (position, len(hashes)):
                ready_step = self._rows.last_step.item(row) + 1 if self._clock.step else 0
                self._cache(row, Filled(info, hashes, position, position, ready_step))

    def cache_tokens(self, row: int, num_tokens: int) -> None:
        """Caches what the row's first `num_tokens` tokens filled."""
        rows = self._rows
        self._cache(row, self._filled(row, num_tokens, int(rows.position[row]), int(rows.last_step[row])))

    def cache_rows(self, rows: NDArray[np.intp]) -> None:
        """`cache_row` for many rows."""
        if not self._cacheable:
            return
        if self.delayed:
            rows = rows[~np.isin(rows, list(self.delayed))]
        positions, steps = self._rows.position[rows].tolist(), self._rows.last_step[rows].tolist()
        filled = [
            self._filled(row, position, position, step)
            for row, position, step in zip(rows.tolist(), positions, steps, strict=True)
        ]
        for manager in self._cacheable:
            manager.cache_rows(rows, filled)

    def arrived(self, row: int, num_tokens: int) -> None:
        """The content of the first `num_tokens` tokens is there: caches it, and what follows as it fills."""
        self.delayed.discard(row)
        if self._cacheable:
            self.cache_tokens(row, num_tokens)
        self._refresh(row, self._rows.position.item(row))

    def _cache(self, row: int, filled: Filled) -> None:
        if filled.tokens == filled.position:
            filled.info.looked_at = filled.tokens, len(filled.hashes)
        for manager in self._cacheable:
            manager.cache(row, filled)

    def _filled(self, row: int, num_tokens: int, position: int, last_step: int) -> Filled:
        info = self._rows.info(row)
        hashes = info.request.block_hashes(self._hasher)
        return Filled(info, hashes, num_tokens, position, last_step + 1 if self._clock.step else 0)

    def _refresh(self, row: int, position: int) -> None:
        cache_at = self._rows.refresh_one(row)
        if row in self.delayed:
            self._rows.cache_at[row] = NEVER
        elif cache_at <= position:
            # Complete, but of tokens that are not known yet.
            self._may_have_to_cache = True

    # Letting go

    def let_go(self, row: int, computed: int) -> None:
        """Frees what no token after the row's first `computed` reads. What is complete is cached before."""
        if self._rows.position.item(row) >= self._rows.cache_at.item(row):
            self.cache_row(row)
        for manager in self._giving_back:
            manager.release_skipped(row, computed)

    def let_go_rows(self, rows: NDArray[np.intp], computed: NDArray[np.int64]) -> None:
        """Frees what these rows leave behind once `computed` tokens are settled,
        and what all others already have.
        """
        self.catch_up_caching()
        for manager in self._giving_back:
            manager.release_rows(rows, computed)
        self.catch_up()

    # Catching up

    def catch_up_caching(self) -> None:
        """Caches what rows completed while they were not looked at."""
        if not self._may_have_to_cache:
            return
        rows = self._rows.to_cache()
        if len(rows):
            self.cache_rows(rows)
            self._rows.refresh(rows)
        else:
            self._may_have_to_cache = False

    def catch_up(self) -> None:
        """Frees what rows left behind while they were not looked at."""
        if self._has_lazy_rows:
            self._has_lazy_rows = False
            self.catch_up_caching()
            rows = self._rows.active()
            for manager in self._giving_back:
                manager.release_rows(rows, self._rows.computed[rows])
