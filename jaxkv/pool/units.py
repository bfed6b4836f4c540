"""What a request gives up, and in which order."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Units(NamedTuple):
    """Different units of one manager, those of the last tokens first.

    leaders: intp[n] where the ranks have a step, a list where they are single ones.
    ranks: minus the token position where each ends.
    """

    leaders: NDArray[np.intp] | list[int]
    ranks: Sequence[int]

    def first(self, n: int) -> "Units":
        """The first n of them."""
        return Units(self.leaders[:n], self.ranks[:n])


_FEW = 128
"""So many units are sorted without arrays: once a request, when nothing that numpy's sorting uses is in the
processor's caches, that takes a fraction of the time.
"""


def by_end(parts: Sequence[Units]) -> NDArray[np.intp]:
    """intp[n]: the leaders of all parts, those that end last first; of equal ends the first part's first."""
    num_units, last, begin_alike = 0, None, True
    runs: list[tuple[NDArray[np.intp] | list[int], range]] = []
    for leaders, ranks in parts:
        num_units += len(leaders)
        if type(ranks) is range:
            if ranks:
                runs.append((leaders, ranks))
                first = runs[0][1]
                begin_alike = begin_alike and ranks.start == first.start and ranks.step == first.step
        elif ranks and (last is None or ranks[-1] > last):
            last = ranks[-1]
    if len(runs) == 1 and len(runs[0][1]) == num_units:
        return np.asarray(runs[0][0], np.intp)
    order = np.empty(num_units, np.intp)
    if not runs or not begin_alike:
        order[:] = _sorted(parts)
        return order
    done = start = 0
    if last is not None:
        # Only what single units are among has to be sorted: usually the end of a long prompt.
        ranks = runs[0][1]
        start = max(0, (last - ranks.start) // ranks.step + 1)
        head = _sorted([u if type(u.ranks) is not range else u.first(start) for u in parts])
        done = len(head)
        order[:done] = head
    # Usual: equal block sizes, and all reach the end. One unit of each run in turn, as long as all have one.
    while len(runs) > 1:
        stop, turns = min([len(ranks) for _, ranks in runs]), len(runs)
        if stop > start:
            begin, done = done, done + (stop - start) * turns
            for place, (leaders, _) in enumerate(runs):
                order[begin + place : done : turns] = leaders[start:stop]
            start = stop
        runs = [run for run in runs if len(run[1]) > stop]
    if runs:
        order[done:] = runs[0][0][start:]
    return order


def _sorted(parts: Sequence[Units]) -> list[int] | NDArray[np.intp]:
    """`by_end` of any units."""
    ranks: list[int] = []
    for units in parts:
        ranks += units.ranks
    if len(ranks) > _FEW:
        leaders = np.concatenate([np.asarray(units.leaders, np.intp) for units in parts])
        return leaders[np.array(ranks).argsort(kind="stable")]
    few: list[int] = []
    for units in parts:
        few += units.leaders if isinstance(units.leaders, list) else units.leaders.tolist()
    return [few[index] for index in sorted(range(len(few)), key=ranks.__getitem__)]
