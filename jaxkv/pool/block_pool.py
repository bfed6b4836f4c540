"""Ids, reference counts and free units of one pool that all managers share.

A manager serves groups with equal specs, which always move together. One position in its tables is a *unit*:
`width` ids, one for each sibling group (or for each block of a recurrent state). The unit's first id, its
*leader*, stands for all of them: reference count, hash and place in the free queues are kept for leaders
only, so their cost does not depend on the number of groups.

Free ids are given out in this order, so that nothing that a hit could use goes before something that none
can: plain ids (no content worth anything), then weak units (cached, but at a place where the retention policy
expects no hit), then strong ones; within a class the least recently freed first. An eviction policy may do
without the difference, and may have strong units wait longer in queues of higher levels.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.checks import check_int
from jaxkv.pool.lru import LruQueue

NULL_BLOCK = 0
"""The id that stands for no block: never given out, never read as data."""

MAX_BLOCKS = int(np.iinfo(np.int32).max)
"""Ids are int32."""

NOT_CACHED = -1

_TURN = 64
"""Ids that one level gives up before the others are looked at again."""

EvictionListener = Callable[[NDArray[np.integer]], None]
"""Told which units (leaders, all of one manager) lose their content, before it happens."""


class Units(NamedTuple):
    """Different units: intp[n] leaders, and the token position where each ends, int64[n]."""

    leaders: NDArray[np.intp]
    ends: NDArray[np.int64]


class BlockPool:
    """Who holds which id.

    refs: int32[num_blocks], holders of each unit, by leader. Ids that are not leaders stay at 0.
    cached_by: int16[num_blocks], number of the manager in whose index the unit is, or NOT_CACHED.
    strong: bool[num_blocks], whether the retention policy wants the cached unit.
    ready_step: int64[num_blocks], first step that may read a cached unit's content before it runs.
    hash_of: object[num_blocks], the hash (bytes) of each cached unit, by leader; None for all others.
    num_free: ids that can be taken at once, cached ones included.
    credits: by level, how many more units must be freed before one of that level goes.
    version: grows whenever a unit loses its content, so that a look-up's answer can be known to be stale.
    """

    def __init__(self, num_blocks: int, *, unwanted_first: bool = True, num_levels: int = 1) -> None:
        check_int("num_blocks", num_blocks, 1, MAX_BLOCKS)
        self.num_blocks = num_blocks
        # np.full and not np.zeros: memory that is first touched here does not fault later, in the middle of a
        # step.
        self.refs: NDArray[np.int32] = np.full(num_blocks, 0, np.int32)
        self.cached_by: NDArray[np.int16] = np.full(num_blocks, NOT_CACHED, np.int16)
        self.strong: NDArray[np.bool_] = np.full(num_blocks, 0, np.bool_)
        self.ready_step: NDArray[np.int64] = np.full(num_blocks, 0, np.int64)
        self.hash_of: NDArray[np.object_] = np.full(num_blocks, None, np.object_)
        self.num_free = num_blocks - 1
        self.version = 0
        self._plain = np.arange(num_blocks - 1, -1, -1, dtype=np.intp)
        self._num_plain = num_blocks - 1
        stamps = np.full(num_blocks, 0, np.int64)
        self._stamps = stamps
        self._next_stamp = 1
        self._weak = LruQueue(stamps)
        self._unwanted_first = unwanted_first
        self._levels = tuple(LruQueue(stamps) for _ in range(num_levels))
        self.credits = [0] * num_levels
        self._members: list[NDArray[np.int32] | None] = []
        self._widths: list[int] = []
        self._width_array: NDArray[np.int64] = np.empty(0, np.int64)
        self._are_wide = False
        self._listeners: list[EvictionListener] = []

    def register(self, width: int, on_evict: EvictionListener) -> int:
        """Adds a manager whose units have `width` ids; returns its number."""
        self._widths.append(width)
        self._width_array = np.array(self._widths, np.int64)
        self._are_wide = max(self._widths) > 1
        self._members.append(np.full((self.num_blocks, width), 0, np.int32) if width > 1 else None)
        self._listeners.append(on_evict)
        return len(self._widths) - 1

    def take(self, manager: int, num_units: int) -> NDArray[np.intp]:
        """New units with one holder each: intp[width, num_units], row 0 the leaders.

        The caller has made sure that num_units * width <= num_free.
        """
        width = self._widths[manager]
        needed = num_units * width
        if needed > self._num_plain:
            self._evict(needed - self._num_plain)
        stop = self._num_plain
        self._num_plain -= needed
        self.num_free -= needed
        ids = self._plain[self._num_plain : stop][::-1].reshape(num_units, width).T.copy()
        leaders = ids[0]
        self.refs[leaders] = 1
        members = self._members[manager]
        if members is not None:
            members[leaders] = ids.T
        return ids

    def take_unit(self, manager: int) -> NDArray[np.intp]:
        """`take` of one unit: its ids, intp[width]."""
        width = self._widths[manager]
        if width > self._num_plain:
            self._evict(width - self._num_plain)
        stop = self._num_plain
        self._num_plain -= width
        self.num_free -= width
        ids = self._plain[self._num_plain : stop][::-1].copy()
        self.refs[ids[0]] = 1
        members = self._members[manager]
        if members is not None:
            members[ids[0]] = ids
        return ids

    def take_one(self, manager: int) -> int:
        """`take` of one unit: its leader."""
        return int(self.take_unit(manager)[0])

    def make_room(self, num_ids: int) -> None:
        """Takes the content of free units now that `num_ids` ids are about to be taken, by any managers.

        Not needed before `take`, but one call for all takes is quicker.
        """
        if num_ids > self._num_plain:
            self._evict(num_ids - self._num_plain)

    def members(self, manager: int, leaders: NDArray[np.integer]) -> NDArray[np.int32]:
        """int32[width, n]: the ids of n units."""
        members = self._members[manager]
        return leaders.astype(np.int32)[None, :] if members is None else members[leaders].T

    def count_free(self, leaders: NDArray[np.integer]) -> int:
        """How many of the units nobody holds."""
        return len(leaders) - int(np.count_nonzero(self.refs[leaders]))

    def touch(self, manager: int, leaders: NDArray[np.integer]) -> None:
        """One more holder for each of int32[n] different units. Free ones leave the free queues."""
        leaders = _as_index(leaders)
        refs = self.refs[leaders]
        freed = leaders[refs == 0]
        self.refs[leaders] = refs + 1
        if len(freed):
            self._stamps[freed] = 0
            self.num_free -= len(freed) * self._widths[manager]

    def drop(self, manager: int, leaders: NDArray[np.integer]) -> NDArray[np.intp]:
        """One holder less for each of int[n] different units.

        Units without content and without holder become plain ids. Returns the cached ones that nobody holds
        any more, in the order given: the caller must pass them to `enqueue`.
        """
        leaders = _as_index(leaders)
        returned = self._drop(manager, leaders)
        return leaders if returned is None else leaders[returned]

    def drop_units(self, manager: int, units: Units) -> Units:
        """`drop` that keeps count of where the units end."""
        returned = self._drop(manager, units.leaders)
        return units if returned is None else Units(units.leaders[returned], units.ends[returned])

    def _drop(self, manager: int, leaders: NDArray[np.intp]) -> NDArray[np.bool_] | None:
        """Which of the units are now free and cached; None: all of them."""
        refs = self.refs[leaders] - 1
        self.refs[leaders] = refs
        cached = self.cached_by[leaders] != NOT_CACHED
        num_held, num_cached = np.count_nonzero(refs), np.count_nonzero(cached)
        self.num_free += (len(leaders) - int(num_held)) * self._widths[manager]
        if not num_held and num_cached == len(leaders):
            return None
        freed = refs == 0
        plain = leaders[freed & ~cached]
        if len(plain):
            self._push_plain(manager, plain)
        return freed & cached

    def let_go_one(self, manager: int, leader: int) -> None:
        """`drop` and `enqueue` of one unit."""
        refs = self.refs[leader] - 1
        self.refs[leader] = refs
        if refs:
            return
        self.num_free += self._widths[manager]
        if self.cached_by[leader] == NOT_CACHED:
            self._push_plain(manager, np.array([leader]))
            return
        self._enqueue_one(leader)

    def enqueue(self, leaders: NDArray[np.integer], level: int = 0) -> None:
        """Puts free cached units, of any managers, at the end of the free queues;
        the first given goes first. level: of the strong ones.
        """
        if not len(leaders):
            return
        leaders = _as_index(leaders)
        strong = self.strong[leaders]
        num_strong = int(np.count_nonzero(strong)) if self._unwanted_first else len(leaders)
        if num_strong < len(leaders):
            self._weak.push(leaders[~strong] if num_strong else leaders, self._next_stamp)
        if num_strong:
            queue = self._levels[level]
            queue.push(leaders[strong] if num_strong < len(leaders) else leaders, self._next_stamp)
        self._next_stamp += len(leaders)

    def promote(self, leaders: NDArray[np.integer]) -> None:
        """Makes cached units strong; free ones move to the end of the strong queue."""
        weak = leaders[~self.strong[leaders]]
        self.strong[weak] = True
        self.enqueue(weak[self.refs[weak] == 0])

    def promote_one(self, leader: int) -> None:
        """`promote` of one unit."""
        if not self.strong[leader]:
            self.strong[leader] = True
            if not self.refs[leader]:
                self._enqueue_one(leader)

    def set_cached(
        self,
        manager: int,
        leaders: NDArray[np.integer] | int,
        strong: NDArray[np.bool_] | bool,
        ready_step: NDArray[np.int64] | int,
    ) -> None:
        """Units (or one) that somebody holds get content worth keeping. Their hashes are the manager's to
        record.
        """
        if not isinstance(leaders, int):
            leaders = _as_index(leaders)
        self.cached_by[leaders] = manager
        self.strong[leaders] = strong
        self.ready_step[leaders] = ready_step

    def forget(self, manager: int, leaders: NDArray[np.integer]) -> None:
        """Units lose their content: free ones become plain ids, held ones stay with their holders."""
        if len(leaders):
            self._lose_content(manager, leaders)
            free = leaders[self.refs[leaders] == 0]
            self._stamps[free] = 0
            self._push_plain(manager, free)

    def cached_units(self, manager: int) -> NDArray[np.int32]:
        """int32[n]: leaders of all units in the manager's index, held or free."""
        return np.flatnonzero(self.cached_by == manager).astype(np.int32)

    def plain_ids(self) -> NDArray[np.integer]:
        """int[n]: free ids without content, the next to be given out last."""
        return self._plain[: self._num_plain]

    def free_units(self) -> NDArray[np.intp]:
        """intp[n]: leaders of free cached units, the next to be evicted first."""
        return np.concatenate([queue.leaders() for queue in (self._weak, *self._levels)])

    def ids_of(self, leader: int, manager: int) -> list[int]:
        """The ids of one unit."""
        return self.members(manager, np.array([leader], np.int32))[:, 0].tolist()

    def _enqueue_one(self, leader: int) -> None:
        """`enqueue` of one unit at the lowest level."""
        queue = self._weak if self._unwanted_first and not self.strong[leader] else self._levels[0]
        queue.push_one(leader, self._next_stamp)
        self._next_stamp += 1

    def _lose_content(self, manager: int, leaders: NDArray[np.integer]) -> None:
        self._listeners[manager](leaders)
        self.version += 1
        self.cached_by[leaders] = NOT_CACHED

    def _push_plain(self, manager: int, leaders: NDArray[np.integer]) -> None:
        """Free units, which are counted as such, become plain ids."""
        members = self._members[manager]
        ids = leaders if members is None else members[leaders].T.ravel()
        self._plain[self._num_plain : self._num_plain + len(ids)] = ids
        self._num_plain += len(ids)

    def _evict(self, num_ids: int) -> None:
        """Turns cached free units into at least `num_ids` plain ids."""
        goal = self._num_plain + num_ids
        while self._num_plain < goal and (queue := self._next_queue()) is not None:
            room = goal - self._num_plain
            if len(self._levels) > 1 and queue is not self._weak:
                # The next one's turn may come before all are taken.
                room = min(room, _TURN)
            leaders = queue.pop(room, self._widths_of if self._are_wide else None)
            for manager, theirs in self._by_manager(leaders):
                self._lose_content(manager, theirs)
                self._push_plain(manager, theirs)
        if self._num_plain < goal:
            raise RuntimeError(f"{goal - self._num_plain} ids more were promised than are free")

    def _next_queue(self) -> LruQueue | None:
        """The queue whose first unit is the next to go; None where all are empty."""
        if not self._weak.is_empty:
            return self._weak
        if len(self._levels) == 1:
            return None if self._levels[0].is_empty else self._levels[0]
        first: dict[int, LruQueue] = {}
        for queue, credit in zip(self._levels, self.credits, strict=True):
            oldest = queue.oldest()
            if oldest is not None:
                first.setdefault(oldest + credit, queue)
        return first[min(first)] if first else None

    def _by_manager(self, leaders: NDArray[np.intp]) -> list[tuple[int, NDArray[np.intp]]]:
        """Cached units by the manager whose they are."""
        if not len(leaders):
            return []
        if len(self._widths) == 1:
            return [(0, leaders)]
        owners = self.cached_by[leaders]
        first = int(owners[0])
        if np.count_nonzero(owners == first) == len(leaders):
            return [(first, leaders)]
        return [(manager, leaders[owners == manager]) for manager in set(owners.tolist())]

    def _widths_of(self, leaders: NDArray[np.integer]) -> NDArray[np.int64]:
        """int64[n]: ids of each cached unit."""
        return self._width_array[self.cached_by[leaders]]


def _as_index(leaders: NDArray[np.integer]) -> NDArray[np.intp]:
    """The leaders in the type that numpy indexes with: with int32 each use takes three times as long."""
    return leaders.astype(np.intp, copy=False)
