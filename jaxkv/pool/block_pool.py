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

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from jaxkv.checks import check_int
from jaxkv.pool.lru import LruQueue
from jaxkv.pool.unit_words import CONTENT, HOLDER, NOBODY, SHARED, UnitWords

NULL_BLOCK = 0
"""The id that stands for no block: never given out, never read as data."""

MAX_BLOCKS = 2**27
"""Ids and places in all queues are int32."""

NOT_CACHED = -1

_TURN = 64
"""Ids that one level gives up before the others are looked at again."""

_FEW = 8
"""So many ids, or unwanted units where there are no more, are evicted one unit at a time: it is quicker."""

EvictionListener = Callable[[NDArray[np.integer] | int], object]
"""Told which units (leaders, all of one manager) or which one lose their content, before it happens."""


class BlockPool:
    """Who holds which id.

    holders: int32[num_blocks], how many hold each unit, by leader; below 0 for those in the free queues. Ids
    that are not leaders stay at 0.
    cached: bool[num_blocks], whether the unit is in its manager's index. owner: int16[num_blocks], number of
    that manager.
    strong: bool[num_blocks], whether the retention policy wants the cached unit.
    ready_step: int64[num_blocks], first step that may read a cached unit's content before it runs; kept for
    states, and for blocks that hits may end in.
    hash_of: object[num_blocks], the hash (bytes) of each unit that is entered in its manager's index, by
    leader; None for all others.
    num_free: ids that can be taken at once, cached ones included.
    num_further: holders of all units, each one's first left out. As long as there are none, a unit need not
    be looked at to know that nobody holds it once its holder lets go of it.
    credits: by level, how many more units must be freed before one of that level goes.
    widths: by manager, ids of a unit.
    version: grows whenever a unit loses its content, so that a look-up's answer can be known to be stale.
    """

    def __init__(self, num_blocks: int, *, unwanted_first: bool = True, num_levels: int = 1) -> None:
        check_int("num_blocks", num_blocks, 1, MAX_BLOCKS)
        self.num_blocks = num_blocks
        self._units = units = UnitWords(num_blocks)
        self._words = units.words
        self.holders, self.owner = units.holders, units.owner
        self.cached, self.strong = units.cached, units.strong
        # np.full and not np.zeros: see UnitWords.
        self.ready_step: NDArray[np.int64] = np.full(num_blocks, 0, np.int64)
        self.hash_of: NDArray[np.object_] = np.full(num_blocks, None, np.object_)
        self.num_free = num_blocks - 1
        self.version = 0
        self._plain = np.arange(num_blocks - 1, -1, -1, dtype=np.intp)
        self._num_plain = num_blocks - 1
        self.num_further = 0
        self._time = 0
        keeps_time = num_levels > 1
        self._weak = LruQueue(self.holders, 0, keeps_time=False)
        self._unwanted_first = unwanted_first
        self._levels = tuple(
            LruQueue(self.holders, 1 + level, keeps_time=keeps_time) for level in range(num_levels)
        )
        self.credits = [0] * num_levels
        self._members: list[NDArray[np.int32] | None] = []
        self._new_words: list[NDArray[np.int64]] = []
        self.widths: list[int] = []
        self._width_array: NDArray[np.int64] = np.empty(0, np.int64)
        self._are_wide = False
        self._listeners: list[EvictionListener] = []
        # By manager: units that are about to be taken together, and those that lost their content for it.
        self._wanted: Sequence[int] = ()
        self._reserved: dict[int, NDArray[np.intp]] = {}

    def register(self, width: int, on_evict: EvictionListener) -> int:
        """Adds a manager whose units have `width` ids; returns its number."""
        number = len(self.widths)
        self.widths.append(width)
        self._width_array = np.array(self.widths, np.int64)
        self._are_wide = max(self.widths) > 1
        self._members.append(np.full((self.num_blocks, width), 0, np.int32) if width > 1 else None)
        self._new_words.append(np.array(HOLDER + number))
        self._listeners.append(on_evict)
        return number

    @property
    def cached_by(self) -> NDArray[np.integer]:
        """int[num_blocks]: number of the manager in whose index each unit is, or NOT_CACHED. To look at."""
        return np.where(self.cached, self.owner, NOT_CACHED)

    @property
    def refs(self) -> NDArray[np.int32]:
        """int32[num_blocks]: how many hold each unit, by leader. To look at."""
        return np.maximum(self.holders, 0)

    def take(self, manager: int, num_units: int) -> NDArray[np.integer]:
        """New units with one holder each: int[width, num_units], row 0 the leaders.

        The caller has made sure that num_units * width <= num_free.
        """
        if num_units == 1:
            return self._take_one(manager)[:, None]
        width = self.widths[manager]
        needed = num_units * width
        self.num_free -= needed
        members = self._members[manager]
        reserved = self._reserved.pop(manager, None)
        if reserved is not None:
            self._words[reserved] = self._new_words[manager]
            return reserved[None] if members is None else members[reserved].T
        if needed > self._num_plain:
            self._evict(needed - self._num_plain)
        stop = self._num_plain
        self._num_plain -= needed
        ids = self._plain[self._num_plain : stop][::-1]
        if members is None:
            ids = ids[None].copy()
            self._words[ids[0]] = self._new_words[manager]
            return ids
        ids = ids.reshape(num_units, width).T.copy()
        self._words[ids[0]] = self._new_words[manager]
        members[ids[0]] = ids.T
        return ids

    def _take_one(self, manager: int) -> NDArray[np.intp]:
        """`take` of one unit: its ids, intp[width]."""
        width = self.widths[manager]
        if width > self._num_plain:
            self._evict(width - self._num_plain)
        stop = self._num_plain
        self._num_plain -= width
        self.num_free -= width
        ids = self._plain[self._num_plain : stop][::-1].copy()
        self._words[ids[0]] = self._new_words[manager]
        members = self._members[manager]
        if members is not None:
            members[ids[0]] = ids
        return ids

    def make_room(self, num_ids: int, num_units: Sequence[int] = ()) -> None:
        """Takes the content of free units now that `num_ids` ids are about to be taken, by any managers.

        Not needed before `take`, but one call for all takes is quicker. num_units: by manager, what each is
        going to `take` next, in one call. A manager's own units then come back to it as they are.
        """
        if num_ids > self._num_plain:
            self._wanted = num_units
            self._evict(num_ids - self._num_plain)
            self._wanted = ()

    def members(self, manager: int, leaders: NDArray[np.integer]) -> NDArray[np.int32]:
        """int32[width, n]: the ids of n units."""
        members = self._members[manager]
        return leaders.astype(np.int32)[None, :] if members is None else members[leaders].T

    def count_free(self, leaders: NDArray[np.integer]) -> int:
        """How many of the units nobody holds."""
        return int(np.count_nonzero(self.holders[leaders] < 1))

    def touch(self, manager: int, leaders: NDArray[np.integer]) -> None:
        """One more holder for each of int[n] different units. Free ones leave the free queues."""
        leaders = _as_index(leaders)
        words = self._words[leaders]
        free = words < NOBODY
        num_free = int(np.count_nonzero(free))
        if num_free:
            words[free] &= CONTENT
            self.num_free -= num_free * self.widths[manager]
        self._words[leaders] = words + HOLDER
        self.num_further += len(leaders) - num_free

    def let_go(self, leaders: NDArray[np.integer], level: int = 0, num_ids: int | None = None) -> None:
        """One holder less for each of int[n] different units, of any managers.

        Of those that nobody holds any more the ones without content become plain ids, and the others join the
        free queues: the first given goes first. Units that are in the queues already only get a new place.
        level: of the strong ones. num_ids: of all these units that somebody holds, where the caller knows it.
        """
        leaders = _as_index(leaders)
        if num_ids is None:
            num_ids = self._num_ids(leaders)
        if self.num_further:
            leaders, shared = self._parted_by_holders(leaders)
            num_ids -= self._num_ids(shared)
        self.num_free += num_ids
        others, chosen = self._parted_by_content(leaders)
        time = self._time
        if len(others):
            self._let_go_unwanted(others)
        if len(chosen):
            self._levels[level].push(chosen, time)
            self._time += len(chosen)

    def _num_ids(self, leaders: NDArray[np.intp]) -> int:
        return int(self._width_array[self.owner[leaders]].sum()) if self._are_wide else len(leaders)

    def _parted_by_holders(self, leaders: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The units that had one holder, and those that others hold as well, which lose one."""
        words = self._words[leaders]
        shared = words >= SHARED
        num_shared = int(np.count_nonzero(shared))
        if not num_shared:
            return leaders, leaders[:0]
        theirs = leaders[shared]
        self._words[theirs] = words[shared] - HOLDER
        self.num_further -= num_shared
        return leaders[~shared], theirs

    def _parted_by_content(self, leaders: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The units that go before all others, and the others: those with wanted content or, where the policy
        does without the difference, with any.
        """
        # Questions to bytes: a comparison and a count of arrays take longer than all the rest, as nothing
        # else calls for them.
        chosen = (self.strong if self._unwanted_first else self.cached)[leaders].tobytes()
        first = chosen.find(1)
        if first < 0:
            return leaders, leaders[:0]
        if chosen.find(0, first) < 0:
            # Usual: what a request has not filled, and what lies beyond its boundaries, comes first.
            return leaders[:first], leaders[first:]
        mask = np.frombuffer(chosen, np.bool_)
        return leaders[~mask], leaders[mask]

    def _let_go_unwanted(self, leaders: NDArray[np.intp]) -> None:
        """Free units without wanted content queue up with their like, or become plain ids."""
        if len(leaders) <= _FEW:
            for leader in leaders.tolist():
                self._let_go_unwanted_one(leader)
            return
        cached = self.cached[leaders]
        num_cached = int(np.count_nonzero(cached))
        if num_cached < len(leaders):
            plain = leaders[~cached]
            leaders = leaders[cached]
            self.holders[plain] = 0
            self._push_plain(plain)
        self._weak.push(leaders, self._time)
        self._time += num_cached

    def _let_go_unwanted_one(self, leader: int) -> None:
        """`_let_go_unwanted` of one unit."""
        if self.cached.item(leader):
            self._weak.push_one(leader, self._time)
            self._time += 1
        else:
            self.holders[leader] = 0
            self._push_plain_one(leader)

    def let_go_one(self, leader: int) -> None:
        """`let_go` of one unit."""
        holders = self.holders.item(leader) - 1
        if holders:
            self.holders[leader] = holders
            self.num_further -= 1
            return
        self.num_free += self.widths[self.owner.item(leader)]
        if self.cached[leader]:
            self._enqueue_one(leader)
        else:
            self.holders[leader] = 0
            self._push_plain_one(leader)

    def promote(self, leader: int) -> None:
        """Makes a cached unit strong; a free one moves to the end of the strong queue."""
        if not self.strong[leader]:
            self.strong[leader] = True
            if self.holders[leader] < 0:
                self._enqueue_one(leader)

    def set_cached(
        self,
        leaders: NDArray[np.integer] | int,
        strong: NDArray[np.bool_] | bool,
        ready_step: NDArray[np.int64] | int | None,
    ) -> None:
        """Units (or one) that somebody holds get content worth keeping. Their hashes are the manager's to
        record. ready_step: None where nobody asks.
        """
        if not isinstance(leaders, int):
            leaders = _as_index(leaders)
        self._units.get_content(leaders, strong)
        if ready_step is not None:
            self.ready_step[leaders] = ready_step

    def forget(self, manager: int, leaders: NDArray[np.integer]) -> None:
        """Units of a manager lose their content: free ones become plain ids, held ones stay with their
        holders.
        """
        if len(leaders):
            self._lose_content(manager, leaders)
            self._units.lose_content(leaders)
            free = leaders[self.holders[leaders] < 0]
            self.holders[free] = 0
            self._push_plain(free)

    def cached_units(self, manager: int) -> NDArray[np.int32]:
        """int32[n]: leaders of all units in the manager's index, held or free."""
        return np.flatnonzero(self.cached & (self.owner == manager)).astype(np.int32)

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
        """A free cached unit joins the free queues at the lowest level."""
        queue = self._weak if self._unwanted_first and not self.strong[leader] else self._levels[0]
        queue.push_one(leader, self._time)
        self._time += 1

    def _lose_content(self, manager: int, leaders: NDArray[np.integer] | int) -> None:
        """Tells that units (or the one) of a manager are about to lose their content."""
        self._listeners[manager](leaders)
        self.version += 1

    def _push_plain(self, leaders: NDArray[np.integer]) -> None:
        """Free units, of any managers, which are counted as such, become plain ids."""
        if not self._are_wide:
            self._push_plain_of(0, leaders)
        elif len(leaders) <= _FEW:
            for leader in leaders.tolist():
                self._push_plain_one(leader)
        else:
            owners = self.owner[leaders]
            for manager in range(len(self.widths)):
                self._push_plain_of(manager, leaders[owners == manager])

    def _push_plain_of(self, manager: int, leaders: NDArray[np.integer]) -> None:
        """`_push_plain` of units of one manager, or of managers whose units have one id."""
        members, first = self._members[manager], self._num_plain
        ids = leaders if members is None else members[leaders].T.ravel()
        self._num_plain = first + len(ids)
        self._plain[first : self._num_plain] = ids

    def _push_plain_one(self, leader: int) -> None:
        """`_push_plain` of one unit."""
        manager = self.owner[leader]
        members, first = self._members[manager], self._num_plain
        self._num_plain += self.widths[manager]
        self._plain[first : self._num_plain] = leader if members is None else members[leader]

    def _evict(self, num_ids: int) -> None:
        """Takes the content of free cached units that have at least `num_ids` ids."""
        while num_ids > 0 and (queue := self._next_queue()) is not None:
            if num_ids <= _FEW or (queue is self._weak and queue.num_places <= _FEW):
                num_ids -= self._evict_one_from(queue)
            elif len(self._levels) > 1 and queue is not self._weak:
                # The next one's turn may come before all are taken.
                num_ids -= self._evict_from(queue, min(num_ids, _TURN))
            else:
                num_ids -= self._evict_from(queue, num_ids)
        if num_ids > 0:
            raise RuntimeError(f"{num_ids} ids more were promised than are free")

    def _evict_from(self, queue: LruQueue, num_ids: int) -> int:
        """Takes the content of a queue's first units, which have `num_ids` ids or a few more, or less where
        it has no more. Returns how many.
        """
        leaders = queue.front(num_ids)
        if not len(leaders):
            return 0
        if len(self.widths) == 1:
            return self._evict_first(queue, 0, leaders, num_ids)
        owners = self.owner[leaders]
        numbers = owners.tobytes()
        # Questions to bytes: see `_parted_by_content`.
        if numbers == numbers[: owners.itemsize] * len(owners):
            return self._evict_first(queue, owners.item(0), leaders, num_ids)
        if self._are_wide:
            reached = self._width_array[owners].cumsum()
            num_enough = int(reached.searchsorted(num_ids)) + 1
            leaders, owners = leaders[:num_enough], owners[:num_enough]
        queue.drop_up_to(leaders.item(-1))
        return sum([self._evict_all(m, leaders[owners == m]) for m in sorted(set(owners.tolist()))])

    def _evict_first(self, queue: LruQueue, manager: int, leaders: NDArray[np.intp], num_ids: int) -> int:
        """`_evict_from` where the queue's first units are all of one manager."""
        leaders = leaders[: -(-num_ids // self.widths[manager])]
        queue.drop_up_to(leaders.item(-1))
        return self._evict_all(manager, leaders)

    def _evict_all(self, manager: int, leaders: NDArray[np.intp]) -> int:
        """Units of a manager, which are in no queue any more, lose their content; returns how many ids they
        have. They become plain ids, or are kept together for the manager where it wants so many.
        """
        self._lose_content(manager, leaders)
        num_ids = len(leaders) * self.widths[manager]
        num_units = self._wanted[manager] if self._wanted else 0
        if _FEW < num_units <= len(leaders) and manager not in self._reserved:
            self._reserved[manager] = leaders[:num_units]
            leaders = leaders[num_units:]
        if len(leaders):
            self._words[leaders] = 0
            self._push_plain_of(manager, leaders)
        return num_ids

    def _evict_one_from(self, queue: LruQueue) -> int:
        """`_evict_from` of one unit."""
        leader = queue.pop_one()
        if leader is None:
            return 0
        manager = self.owner.item(leader)
        self._lose_content(manager, leader)
        self._push_plain_one(leader)
        self._words[leader] = 0
        return self.widths[manager]

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


def _as_index(leaders: NDArray[np.integer]) -> NDArray[np.intp]:
    """The leaders in the type that numpy indexes with: with int32 each use takes three times as long."""
    return leaders.astype(np.intp, copy=False)
