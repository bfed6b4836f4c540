"""A queue of free cached units, least recently freed first, from which units can be taken at any place."""

import numpy as np
from numpy.typing import NDArray

_NOBODY: NDArray[np.intp] = np.empty(0, np.intp)

_SCAN = 64
"""Entries that are looked at together, at least."""


class LruQueue:
    """Leaders of free units in the order in which they were freed. Removal is lazy.

    Every place of a queue has a number below 0 that no other place of any queue with these `places` has, and
    `places[leader]` holds the number of the leader's valid entry: whoever takes a unit out of the queue
    overwrites it, and the old entry is skipped when it comes to the front. So freeing, touching and evicting
    thousands of units are a few numpy calls each.

    number: of the queue, among those that share `places`, int32[number of ids]. keeps_time: `oldest` may be
    asked.
    """

    def __init__(self, places: NDArray[np.int32], number: int, *, keeps_time: bool) -> None:
        room = 2 * len(places)
        self._places = places
        self._leaders = np.zeros(room, np.intp)
        self._numbers = np.arange(-(number + 1) * room, -number * room, dtype=np.int32)
        self._times = np.zeros(room, np.int64) if keeps_time else None
        self._head = 0
        self._tail = 0

    def push(self, leaders: NDArray[np.integer], time: int) -> None:
        """Appends intp[n] leaders, the first of which is the first to go. time: of the first; it passes by 1
        from one to the next.
        """
        n = len(leaders)
        if self._tail + n > len(self._leaders):
            self._compact()
        tail = self._tail
        self._tail = stop = tail + n
        self._leaders[tail:stop] = leaders
        self._places[leaders] = self._numbers[tail:stop]
        if self._times is not None:
            self._times[tail:stop] = np.arange(time, time + n)

    def push_one(self, leader: int, time: int) -> None:
        """`push` of one leader."""
        if self._tail == len(self._leaders):
            self._compact()
        tail = self._tail
        self._tail = tail + 1
        self._leaders[tail] = leader
        self._places[leader] = self._numbers[tail]
        if self._times is not None:
            self._times[tail] = time

    @property
    def num_places(self) -> int:
        """Units in the queue and skipped entries between them."""
        return self._tail - self._head

    @property
    def is_empty(self) -> bool:
        """True only where nothing is in the queue; what is left may all be skipped entries."""
        return self._head == self._tail

    def front(self, most: int) -> NDArray[np.intp]:
        """intp[n]: up to `most` leaders, the oldest first: at least one, unless the queue has none."""
        while self._head < self._tail:
            stop = min(self._tail, self._head + max(_SCAN, most))
            leaders, numbers = self._leaders[self._head : stop], self._numbers[self._head : stop]
            places = self._places[leaders]
            # Usual. A question to bytes, as in `BlockPool`.
            if places.tobytes() == numbers.tobytes():
                return leaders[:most].copy()
            valid = places == numbers
            if np.count_nonzero(valid):
                chosen = leaders[valid][:most]
                self._head += int(valid.argmax())
                return chosen
            self._head = stop
        return _NOBODY

    def pop_one(self) -> int | None:
        """Takes out the oldest leader; None where the queue has none."""
        if self._head == self._tail:
            return None
        leader = self._leaders.item(self._head)
        if self._places.item(leader) != self._numbers.item(self._head):
            leaders = self.front(1)
            if not len(leaders):
                return None
            leader = leaders.item(0)
        self._head += 1
        return leader

    def drop_up_to(self, leader: int) -> None:
        """Takes out the leaders from the oldest up to this one."""
        self._head = int(self._places[leader] - self._numbers[0]) + 1

    def oldest(self) -> int | None:
        """The time of the unit that is the next to go; None where there is none."""
        assert self._times is not None
        return int(self._times[self._head]) if len(self.front(1)) else None

    def leaders(self) -> NDArray[np.intp]:
        """intp[n]: what is in the queue, the next to be evicted first."""
        return self._leaders[self._head : self._tail][self._valid(self._head, self._tail)]

    def _valid(self, start: int, stop: int) -> NDArray[np.bool_]:
        return self._places[self._leaders[start:stop]] == self._numbers[start:stop]

    def _compact(self) -> None:
        """Drops skipped entries. A leader has at most one valid entry,
        so at least half of the room is freed.
        """
        valid = self._valid(self._head, self._tail)
        leaders = self._leaders[self._head : self._tail][valid]
        n = len(leaders)
        if self._times is not None:
            self._times[:n] = self._times[self._head : self._tail][valid]
        self._leaders[:n] = leaders
        self._places[leaders] = self._numbers[:n]
        self._head, self._tail = 0, n
