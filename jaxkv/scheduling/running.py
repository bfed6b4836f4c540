"""The rows that run, oldest request first."""

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from jaxkv.scheduling.waiting import ServiceKey


class RunningRows:
    """Rows sorted by their requests' service keys.

    `rows` is int32[n] and is replaced, never changed, when a row comes or goes: a step may keep it.
    """

    def __init__(self) -> None:
        self.rows: NDArray[np.int32] = np.empty(0, np.int32)
        self._keys: list[ServiceKey] = []

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, row: int, key: ServiceKey) -> None:
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self.rows = np.concatenate([self.rows[:index], np.array([row], np.int32), self.rows[index:]])

    def remove(self, key: ServiceKey) -> None:
        """Takes out the row of this key, which must be here."""
        index = bisect_left(self._keys, key)
        if index == len(self._keys) or self._keys[index] != key:
            raise KeyError(key)
        del self._keys[index]
        self.rows = np.concatenate([self.rows[:index], self.rows[index + 1 :]])
