"""What a pool knows of each unit, in one word: a pass over many units reads and writes memory once."""

import sys

import numpy as np
from numpy.typing import NDArray

# As arrays without dimensions: numpy takes half as long with them as with Python's integers.
HOLDER = np.array(1 << 32)
"""What one holder adds."""
NOBODY = np.array(0)
"""Words of units that wait in a queue are below, those of all others are not."""
SHARED = np.array(2 << 32)
"""Words of units with more than one holder are at least so large."""
CONTENT = np.array((1 << 32) - 1)
"""The part of a word that does not depend on who holds the unit."""

_DTYPES = (np.int16, np.bool_, np.bool_, np.int32)
_OFFSETS = (0, 2, 3, 4) if sys.byteorder == "little" else (6, 5, 4, 0)
_FLAGS_OFFSET = min(_OFFSETS[1:3])
_WEAK_FLAGS, _STRONG_FLAGS = 0x001, 0x101


class UnitWords:
    """words: int64[n], by leader. The other arrays are views of their parts, the lowest first.

    owner: int16[n], number of the unit's manager; means nothing for ids that lead no unit. cached: bool[n],
    it has content. strong: bool[n], it has wanted content: never of one that is not cached. holders:
    int32[n], how many hold it; where nobody does but it has content, its place in the queues, below 0.
    """

    def __init__(self, num_blocks: int) -> None:
        # np.full and not np.zeros: memory that is first touched here does not fault later, in the middle of a
        # step.
        self.words: NDArray[np.int64] = np.full(num_blocks, 0, np.int64)
        self.owner, self.cached, self.strong, self.holders = (
            self._part(dtype, offset) for dtype, offset in zip(_DTYPES, _OFFSETS, strict=True)
        )
        self._flags = self._part(np.int16, _FLAGS_OFFSET)

    def _part(self, dtype: type[np.generic], offset: int) -> NDArray:
        field = np.dtype({"names": ["part"], "formats": [dtype], "offsets": [offset], "itemsize": 8})
        return self.words.view(field)["part"]

    def get_content(self, leaders: NDArray[np.intp] | int, strong: NDArray[np.bool_] | bool) -> None:
        """The units (or the one) have content, which is wanted or not."""
        if isinstance(strong, bool):
            self._flags[leaders] = _STRONG_FLAGS if strong else _WEAK_FLAGS
        else:
            self._flags[leaders] = strong * np.int16(_STRONG_FLAGS - _WEAK_FLAGS) + np.int16(_WEAK_FLAGS)

    def lose_content(self, leaders: NDArray[np.integer]) -> None:
        self._flags[leaders] = 0
