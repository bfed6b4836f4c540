"""What a request gives up, and in which order."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Units(NamedTuple):
    """Different units of one manager, those of the last tokens first.

    ranks: minus the token position where each ends; a range where they have a step.
    """

    leaders: NDArray[np.integer] | list[int]
    ranks: range | list[int]

    def first(self, n: int) -> "Units":
        """The first n of them."""
        return Units(self.leaders[:n], self.ranks[:n])


_FEW = 128
"""So many units are sorted without arrays: once a request, when nothing that numpy's sorting uses is in the
processor's caches, that takes a fraction of the time.
"""


def by_end(parts: Sequence[Units]) -> NDArray[np.intp]:
    """intp[n]: the leaders of all parts, those that end last first; of equal ends the first part's first."""
    if len(parts) == 1:
        return np.asarray(parts[0].leaders, np.intp)
    longest = range(0)
    for _, ranks in parts:
        if type(ranks) is range and len(ranks) > len(longest):
            longest = ranks
    first, step = longest.start, longest.step
    # Parts that begin and go on like the longest one; the last rank of all others.
    num_units, runs, last = 0, [], None
    for units in parts:
        ranks = units.ranks
        num_units += len(ranks)
        if type(ranks) is range and ranks.start == first and ranks.step == step:
            runs.append(units)
        elif ranks and (last is None or ranks[-1] > last):
            last = ranks[-1]
    order = np.empty(num_units, np.intp)
    done = start = 0
    if last is not None:
        # Only what other units are among has to be sorted: usually the end of a long prompt.
        start = max(0, (last - first) // step + 1)
        head = _sorted([part.first(start) if any(part is run for run in runs) else part for part in parts])
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
        runs = [run for run in runs if len(run.ranks) > stop]
    if runs:
        order[done:] = runs[0].leaders[start:]
    return order


def _sorted(parts: Sequence[Units]) -> list[int] | NDArray[np.intp]:
    """`by_end` of any units."""
    all_ranks: list[int] = []
    for _, ranks in parts:
        all_ranks += ranks
    if len(all_ranks) > _FEW:
        every = np.concatenate([np.asarray(leaders, np.intp) for leaders, _ in parts])
        return every[np.array(all_ranks).argsort(kind="stable")]
    few: list[int] = []
    for leaders, _ in parts:
        few += leaders if isinstance(leaders, list) else leaders.tolist()
    return [few[index] for index in sorted(range(len(few)), key=all_ranks.__getitem__)]
