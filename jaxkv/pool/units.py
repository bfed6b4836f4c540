"""What a request gives up, and in which order."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Units(NamedTuple):
    """Different units of one manager, those of the last tokens first.

    leaders: intp[n]. ranks: int64[n], or a range, minus the token position where each ends.
    """

    leaders: NDArray[np.intp]
    ranks: NDArray[np.int64] | range

    @classmethod
    def ranked(cls, ranks: Mapping[int, int]) -> "Units":
        """These leaders with their ranks, which ascend."""
        n = len(ranks)
        if not n:
            return NOTHING
        return cls(np.fromiter(ranks, np.intp, n), np.fromiter(ranks.values(), np.int64, n))


NOTHING = Units(np.empty(0, np.intp), range(0))


def by_end(parts: Sequence[Units]) -> NDArray[np.intp]:
    """intp[n]: the leaders of all parts, those that end last first; of equal ends the first part's first."""
    if len(parts) == 1:
        return parts[0].leaders
    leaders = np.concatenate([units.leaders for units in parts])
    ranks = [
        np.arange(ranks.start, ranks.stop, ranks.step) if isinstance(ranks, range) else ranks
        for _, ranks in parts
    ]
    return leaders[np.concatenate(ranks).argsort(kind="stable")]
