"""Which request is in which row, and how far each row has come: arrays with one entry a row."""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from jaxkv.arrays import grown
from jaxkv.managers import NEVER, Manager, Row

_NOBODY: NDArray[np.int64] = np.array([0, 0, 0, 0, NEVER])
"""What the columns of a row hold where no request is."""


class CacheRows:
    """Rows of the managers' tables.

    computed, position: int64[rows], tokens before and after the row's last step. last_step: int64[rows], its
    number. All 0 where no request is.
    capacity: int64[rows], tokens a row can reach without any work on it, at most max_model_len.
    cache_at: int64[rows], tokens at which it has something new to cache; NEVER where caching is put off.
    """

    def __init__(self, managers: tuple[Manager, ...], num_rows: int, max_model_len: int) -> None:
        self._managers = managers
        self._max_model_len = max_model_len
        self._row_of: dict[str, int] = {}
        self._infos: list[Row | None] = []
        self._unused: list[int] = []
        self._columns: NDArray[np.int64] = np.empty((len(_NOBODY), 0), np.int64)
        self._grow(num_rows)

    def __len__(self) -> int:
        """Requests that have a row."""
        return len(self._row_of)

    def find(self, request_id: str) -> int:
        """The request's row, or -1."""
        return self._row_of.get(request_id, -1)

    def info(self, row: int) -> Row:
        info = self._infos[row]
        if info is None:
            raise KeyError(row)
        return info

    def open(self, request_id: str, info: Row) -> int:
        """A row for a request that has none: the lowest that is unused."""
        if not self._unused:
            self._grow(2 * len(self._infos))
        row = self._unused.pop()
        self._row_of[request_id] = row
        self._infos[row] = info
        return row

    def close(self, request_id: str) -> int:
        """Ends the request's tenancy; returns the row."""
        row = self._row_of.pop(request_id)
        self._infos[row] = None
        self._unused.append(row)
        self._columns[:, row] = _NOBODY
        return row

    def are_different(self, rows: NDArray[np.intp]) -> bool:
        """Whether no row stands twice among int[n] rows of the table."""
        places = np.arange(len(rows))
        self._last_place[rows] = places
        return bool((self._last_place[rows] == places).all())

    def active(self) -> NDArray[np.intp]:
        """intp[n]: rows that hold a request."""
        return np.flatnonzero(self.position)

    def fault(self) -> str | None:
        """What is wrong with the accounts of who is in which row, if anything is."""
        active, named = self.active().tolist(), sorted(self._row_of.values())
        if active != named:
            return f"rows {active} are in use but requests are in rows {named}"
        if sorted(self._unused + named) != list(range(len(self._infos))):
            return f"{len(self._unused)} unused rows and {len(named)} others are not {len(self._infos)}"
        for request_id, row in self._row_of.items():
            info = self._infos[row]
            if info is None or info.request.request_id != request_id:
                return f"row {row} is not request {request_id!r}'s"
        return None

    def to_cache(self) -> NDArray[np.intp]:
        """intp[n]: rows that have something complete that is not in the index."""
        return np.flatnonzero(self.position >= self.cache_at)

    def refresh_one(self, row: int) -> int:
        """Asks the managers anew when this row needs work; returns its `cache_at`."""
        capacity, cache_at = self._max_model_len, NEVER
        for manager in self._managers:
            if (reach := manager.capacity(row)) < capacity:
                capacity = reach
            if manager.cacheable and (place := manager.next_cached(row)) < cache_at:
                cache_at = place
        self.capacity[row] = capacity
        self.cache_at[row] = cache_at
        return cache_at

    def refresh(self, rows: NDArray[np.intp]) -> None:
        """`refresh_one` for many rows."""
        capacity, cache_at = np.full(len(rows), self._max_model_len), np.full(len(rows), NEVER)
        for manager in self._managers:
            capacity = np.minimum(capacity, manager.capacities(rows))
            if manager.cacheable:
                cache_at = np.minimum(cache_at, manager.next_cacheable(rows))
        self.capacity[rows] = capacity
        self.cache_at[rows] = cache_at

    def wrong_figure(self, delayed: Collection[int]) -> str | None:
        """Which row's `capacity` or `cache_at` is not what its managers say now, if any. Changes neither.

        delayed: rows whose caching is put off. A row that has reached its `cache_at` is looked at anyway.
        """
        for row in self.active().tolist():
            capacity, cache_at = self.capacity.item(row), self.cache_at.item(row)
            counted = self.refresh_one(row)
            due, room = NEVER if row in delayed else counted, self.capacity.item(row)
            self.capacity[row], self.cache_at[row] = capacity, cache_at
            if room != capacity:
                return f"row {row} has room for {capacity} tokens, its managers say {room}"
            if cache_at > due or self.position.item(row) < cache_at < due:
                return f"row {row} has something to cache at {cache_at} tokens, its managers say at {due}"
        return None

    def _grow(self, num_rows: int) -> None:
        have = len(self._infos)
        self._columns = grown(self._columns, (len(_NOBODY), num_rows))
        self._columns[:, have:] = _NOBODY[:, None]
        self._last_place: NDArray[np.intp] = np.zeros(num_rows, np.intp)
        self.computed, self.position, self.last_step, self.capacity, self.cache_at = self._columns
        self._infos.extend([None] * (num_rows - have))
        self._unused.extend(range(num_rows - 1, have - 1, -1))
        for manager in self._managers:
            manager.grow_rows(num_rows)
