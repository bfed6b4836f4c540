"""What a request gives up, and in which order."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain
from operator import neg
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_FEW = 32
"""So many units are put in order without arrays, which is quicker then."""


class Units(NamedTuple):
    """Different units of one manager: intp[n] leaders, and the token positions where each ends, the last
    first.
    """

    leaders: NDArray[np.intp]
    ends: Sequence[int]


def by_end(parts: Sequence[Units]) -> NDArray[np.intp]:
    """intp[n]: the leaders of all parts, those that end last first; of equal ends the first part's first."""
    longest = max(parts, key=lambda units: len(units.leaders))
    others = [units for units in parts if units is not longest and len(units.leaders)]
    if not others:
        return longest.leaders
    # What ends before all of the others is in order already.
    lowest = min(units.ends[-1] for units in others)
    mixed = bisect_right(longest.ends, -lowest, key=neg)
    head = Units(longest.leaders[:mixed], longest.ends[:mixed])
    heads = [head if units is longest else units for units in parts]
    leaders = np.concatenate([units.leaders for units in heads])
    if len(leaders) <= _FEW:
        ends = list(chain.from_iterable(units.ends for units in heads))
        order = sorted(range(len(ends)), key=ends.__getitem__, reverse=True)
    else:
        order = (-np.concatenate([_as_array(units.ends) for units in heads])).argsort(kind="stable")
    return np.concatenate([leaders[order], longest.leaders[mixed:]])


def _as_array(ends: Sequence[int]) -> NDArray[np.int64]:
    if isinstance(ends, range):
        return np.arange(ends.start, ends.stop, ends.step)
    return np.array(ends, np.int64)
