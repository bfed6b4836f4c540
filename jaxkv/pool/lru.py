"""A queue of free cached units, least recently freed first, from which units can be taken at any place."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_NOBODY: NDArray[np.intp] = np.empty(0, np.intp)

_SCAN = 64
"""Entries that are looked at together, at least."""


class LruQueue:
    """Leaders of free units in the order in which they were freed. Removal is lazy.

    Every entry carries a stamp, and `stamps[leader]` holds the stamp of the leader's valid entry: whoever
    takes a unit out of the queue sets it to 0, and the old entry is skipped when it comes to the front. So
    freeing, touching and evicting thousands of units are a few numpy calls each. Queues that share `stamps`
    must draw their stamps from one counter.
    """

    def __init__(self, stamps: NDArray[np.int64]) -> None:
        self._stamps = stamps
        self._leaders = np.zeros(2 * len(stamps), np.intp)
        self._entry_stamps = np.zeros(2 * len(stamps), np.int64)
        self._head = 0
        self._tail = 0

    def push(self, leaders: NDArray[np.integer], first_stamp: int) -> None:
        """Appends int32[n] leaders; the first gets `first_stamp` and is the first to go."""
        n = len(leaders)
        if self._tail + n > len(self._leaders):
            self._compact()
        new = np.arange(first_stamp, first_stamp + n)
        self._leaders[self._tail : self._tail + n] = leaders
        self._entry_stamps[self._tail : self._tail + n] = new
        self._stamps[leaders] = new
        self._tail += n

    def push_one(self, leader: int, stamp: int) -> None:
        """`push` of one leader."""
        if self._tail == len(self._leaders):
            self._compact()
        self._leaders[self._tail] = leader
        self._entry_stamps[self._tail] = self._stamps[leader] = stamp
        self._tail += 1

    @property
    def is_empty(self) -> bool:
        """True only where nothing is in the queue; what is left may all be skipped entries."""
        return self._head == self._tail

    def pop(
        self, room: int, costs_of: Callable[[NDArray[np.intp]], NDArray[np.int64]] | None
    ) -> NDArray[np.intp]:
        """Takes out leaders, the oldest first, until their costs (None: 1 each) reach `room`; less only where
        the queue has no more.
        """
        taken: list[NDArray[np.intp]] = []
        while room > 0 and self._head < self._tail:
            stop = min(self._tail, self._head + max(_SCAN, room))
            (valid,) = self._valid(self._head, stop).nonzero()
            chosen = self._leaders[self._head : stop][valid]
            total, num_enough = len(chosen), room
            if costs_of is not None and total:
                reached = costs_of(chosen).cumsum()
                total, num_enough = int(reached[-1]), int(reached.searchsorted(room)) + 1
            if num_enough <= len(chosen):
                chosen, room = chosen[:num_enough], 0
                self._head += int(valid[num_enough - 1]) + 1
            else:
                room -= total
                self._head = stop
            self._stamps[chosen] = 0
            taken.append(chosen)
        return taken[0] if len(taken) == 1 else np.concatenate([_NOBODY, *taken])

    def oldest(self) -> int | None:
        """The stamp of the unit that is the next to go; None where there is none."""
        while self._head < self._tail:
            stop = min(self._tail, self._head + _SCAN)
            (valid,) = self._valid(self._head, stop).nonzero()
            if len(valid):
                self._head += int(valid[0])
                return int(self._entry_stamps[self._head])
            self._head = stop
        return None

    def leaders(self) -> NDArray[np.intp]:
        """intp[n]: what is in the queue, the next to be evicted first."""
        return self._leaders[self._head : self._tail][self._valid(self._head, self._tail)]

    def _valid(self, start: int, stop: int) -> NDArray[np.bool_]:
        return self._stamps[self._leaders[start:stop]] == self._entry_stamps[start:stop]

    def _compact(self) -> None:
        """Drops skipped entries. A leader has at most one valid entry,
        so at least half of the room is freed.
        """
        valid = self._valid(self._head, self._tail)
        leaders = self._leaders[self._head : self._tail][valid]
        stamps = self._entry_stamps[self._head : self._tail][valid]
        self._leaders[: len(leaders)] = leaders
        self._entry_stamps[: len(leaders)] = stamps
        self._head, self._tail = 0, len(leaders)
