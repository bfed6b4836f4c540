"""What a request gives up, and in which order."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Units(NamedTuple):
    """Different units of one manager, those of the last tokens first.

    leaders: intp[n]. ranks: minus the token position where each ends.
    """

    leaders: NDArray[np.intp]
    ranks: Sequence[int]

    @classmethod
    def ranked(cls, ranks: Mapping[int, int]) -> "Units":
        """These leaders with their ranks, which ascend."""
        return cls(np.array([*ranks], np.intp), [*ranks.values()]) if ranks else NOTHING

    def first(self, n: int) -> "Units":
        """The first n of them."""
        return Units(self.leaders[:n], self.ranks[:n])


NOTHING = Units(np.empty(0, np.intp), ())


def _length(units: Units) -> int:
    return len(units.leaders)


def by_end(parts: Sequence[Units]) -> NDArray[np.intp]:
    """intp[n]: the leaders of all parts, those that end last first; of equal ends the first part's first."""
    longest = max(parts, key=_length)
    others = [units for units in parts if units is not longest and len(units.leaders)]
    if not others:
        return longest.leaders
    # Only what the other parts reach among has to be put in order: the end of a long prompt.
    num_first = bisect_right(longest.ranks, max(units.ranks[-1] for units in others))
    heads = [units if units is not longest else longest.first(num_first) for units in parts]
    order = np.concatenate([_as_array(units.ranks) for units in heads]).argsort(kind="stable")
    leaders = np.concatenate([*(units.leaders for units in heads), longest.leaders[num_first:]])
    leaders[: len(order)] = leaders[order]
    return leaders


def _as_array(ranks: Sequence[int]) -> NDArray[np.int64]:
    if isinstance(ranks, range):
        return np.arange(ranks.start, ranks.stop, ranks.step)
    return np.array(ranks, np.int64)
