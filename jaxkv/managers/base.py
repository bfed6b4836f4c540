"""What every manager answers, whatever kind of layer it serves."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.cache_request import CacheRequest
from jaxkv.events import EventLog
from jaxkv.managers.computed_units import ComputedUnits
from jaxkv.managers.prefix_index import PrefixIndex
from jaxkv.metrics import ResidencySampler
from jaxkv.observer import CacheObserver
from jaxkv.pool import BlockPool, Units
from jaxkv.retention import Retention
from jaxkv.specs import KVCacheSpec

NO_UNITS: NDArray[np.int32] = np.empty(0, np.int32)


class HitPart(NamedTuple):
    """What one manager contributes to a hit.

    first_block: position of the first unit. leaders: int32[n], the units of positions first_block onwards;
    for a recurrent kind the one state. copy_from: the unit that holds the last, partly covered block (-1:
    none); it must be copied, because the request is going to write the rest of it. length: tokens of the hit.
    """

    first_block: int
    leaders: NDArray[np.int32]
    copy_from: int = -1
    length: int = 0


_MANY = 16
"""Fewer unwanted units are entered in the index at once."""

NEVER = 2**62
"""More tokens than any request has."""

NO_PART = HitPart(0, NO_UNITS)

NOTHING = Units([], [])


class Span(NamedTuple):
    """The tokens of one request around one step.

    computed: tokens whose content exists before the step (hit and external tokens included).
    after: tokens computed after it. slots: tokens that need room, the look-ahead of drafts included.
    boundaries: where the request's states are wanted.
    num_encoder_tokens: length of the encoder's output, for cross attention.
    """

    computed: int
    after: int
    slots: int
    boundaries: tuple[int, ...] = ()
    num_encoder_tokens: int = 0


@dataclass(slots=True)
class Row:
    """What the managers must know about the request in one row of the tables.

    request: whose row it is. boundaries: positions at which a later request is expected to resume, ascending.
    window_boundaries: those that windows are kept for, ascending. start: tokens it began with.
    looked_at: tokens and known hashes with which it was last looked at for caching.
    """

    request: CacheRequest
    boundaries: tuple[int, ...] = ()
    window_boundaries: tuple[int, ...] = ()
    start: int = 0
    looked_at: tuple[int, int] = (0, 0)


class Filled(NamedTuple):
    """What a row has got to. hashes: of its known tokens; nothing beyond them can be cached.

    tokens: whose content is or is being computed. position: where the row's state stands, tokens too.
    ready_step: first step that may read a state, or copy a block, that the row's last step writes.
    """

    info: Row
    hashes: list[bytes]
    tokens: int
    position: int
    ready_step: int


@dataclass(slots=True)
class StepClock:
    """Number of the step being scheduled; 0 as long as nobody counts steps."""

    step: int = 0


class Finder(ABC):
    """One manager's side of one look-up. It reads the index and changes nothing.

    waits: some longer answer was passed over because its content is only being computed in this step.
    """

    waits = False

    @abstractmethod
    def longest(self, limit: int) -> int:
        """The largest number of tokens, at most `limit`, that this manager can serve."""

    @abstractmethod
    def needs(self, length: int) -> int:
        """Units that serving `length` tokens (an answer of `longest`) takes."""

    @abstractmethod
    def part(self, length: int) -> HitPart:
        """The units of a hit of `length` tokens, an answer of `longest`."""


class ManagerContext(NamedTuple):
    """What all managers of a cache share.

    hash_block_size: tokens one hash covers.
    alignment: every group whose blocks hit whole can serve the multiples of it; states are kept there.
    fine_grained: hits may end inside a block, at any hash; such a block is copied.
    clock: what the managers may know of the running step.
    computed: units that have become complete, where a tier outside the pool wants them.
    events, residency, observer: who is told what happens to cached units, if anybody.
    keeps_unwanted: units that the retention policy does not want are cached, too.
    """

    pool: BlockPool
    retention: Retention
    clock: "StepClock"
    hash_block_size: int
    alignment: int
    fine_grained: bool
    enable_caching: bool
    computed: ComputedUnits
    events: EventLog | None = None
    residency: ResidencySampler | None = None
    observer: CacheObserver | None = None
    keeps_unwanted: bool = True


class Manager(ABC):
    """Owns the units of sibling groups (equal specs) for all requests.

    number: place among the managers. group_ids: the plan's groups it serves, in order.
    width: ids of a unit: len(group_ids) * blocks_per_state, sibling by sibling.
    cacheable: whether its units can be found by hash.
    """

    def __init__(
        self,
        context: ManagerContext,
        spec: KVCacheSpec,
        group_ids: Sequence[int],
        blocks_per_state: int,
        is_eagle: bool,
    ) -> None:
        self.context = context
        self.pool = context.pool
        self.spec = spec
        self.group_ids = tuple(group_ids)
        self.blocks_per_state = blocks_per_state
        self.width = len(self.group_ids) * blocks_per_state
        self.block_size = spec.block_size
        self.is_eagle = is_eagle
        # An EAGLE group must also hold what comes right after the hit: the draft model wrote it with
        # knowledge of it.
        self.eagle_margin = 0
        if is_eagle:
            self.eagle_margin = context.hash_block_size if context.fine_grained else self.block_size
        self.cacheable = context.enable_caching and spec.prefix_cacheable
        self._watched = any(w is not None for w in (context.observer, context.events, context.residency))
        self.index = PrefixIndex(context.pool)
        on_evict = self._on_evict if self._watched else self.index.remove
        self.number = context.pool.register(self.width, on_evict)

    def _on_evict(self, leaders: NDArray[np.integer] | int) -> None:
        leaders = np.atleast_1d(leaders)
        if self.context.observer is not None:
            self.context.observer.evicting(self, leaders)
        gone = self.index.remove(leaders)
        if self.context.events is not None:
            self.context.events.removed(self.group_ids, gone)
        if self.context.residency is not None:
            self.context.residency.evicted(leaders, self.context.clock.step)

    def _add_to_index(
        self,
        leaders: NDArray[np.int32],
        keys: list[bytes],
        strong: NDArray[np.bool_] | bool,
        ready_step: NDArray[np.int64] | int | None,
    ) -> None:
        """Units that a row holds can be found from now on, by these hashes."""
        if not self.context.keeps_unwanted and strong is not True:
            if strong is False:
                return
            keys, leaders = [key for key, kept in zip(keys, strong, strict=True) if kept], leaders[strong]
            if isinstance(ready_step, np.ndarray):
                ready_step = ready_step[strong]
            strong = True
        index = leaders.astype(np.intp)
        # Unwanted ones are often given out before anybody looks for them.
        is_late = strong is False and ready_step is None and not self._watched
        if is_late and len(keys) >= _MANY and not self.context.computed.are_wanted:
            self.index.add_late(keys, index)
        else:
            self.index.add(keys, index)
        self.pool.set_cached(index, strong, ready_step)
        self._tell_cached(index, keys)

    def _add_one_to_index(self, leader: int, key: bytes, strong: bool, ready_step: int | None) -> None:
        """`_add_to_index` of one unit."""
        if strong or self.context.keeps_unwanted:
            self.index.add_one(key, leader)
            self.pool.set_cached(leader, strong, ready_step)
            if self.context.computed.are_wanted or self.context.residency is not None:
                self._tell_cached(np.array([leader]), [key])

    def _tell_cached(self, leaders: NDArray[np.intp], keys: list[bytes]) -> None:
        if self.context.computed.are_wanted:
            self.context.computed.add(self, keys, leaders, self.context.clock.step)
        if self.context.residency is not None:
            self.context.residency.cached(leaders, self.context.clock.step)

    def let_go(self, leaders: NDArray[np.integer]) -> None:
        """One holder less for units of any rows; a unit may appear once for each row that holds it."""
        if len(set(leaders.tolist())) == len(leaders):
            self.pool.let_go(leaders)
            return
        unique, first, counts = np.unique(leaders, return_index=True, return_counts=True)
        order = np.argsort(first)
        unique, counts = unique[order], counts[order]
        while len(unique):
            self.pool.let_go(unique)
            counts -= 1
            unique, counts = unique[counts > 0], counts[counts > 0]

    # Rows

    @abstractmethod
    def grow_rows(self, num_rows: int) -> None:
        """Makes room for rows up to num_rows - 1."""

    @abstractmethod
    def open_row(self, row: int, part: HitPart, span: Span) -> None:
        """Starts a row with the units of a hit, which become held."""

    @abstractmethod
    def close_row(self, row: int) -> Units:
        """Ends a row: its units, those of the last tokens first. They stay held."""

    @abstractmethod
    def units_of(self, row: int) -> NDArray[np.int32]:
        """int32[n]: leaders of all units the row holds."""

    @abstractmethod
    def positional_ids(self, row: int) -> list[list[int]]:
        """By sibling group: the row's ids by block position, 0 where nothing is held.
        To look at, not to compute.
        """

    def ids_at(self, row: int, token: int) -> NDArray[np.int32]:
        """int32[width]: the ids of the row's unit under a token;
        only of managers whose blocks hit in part.
        """
        raise NotImplementedError(f"{self.spec.kind} blocks are never copied")

    # One request

    @property
    def gives_back(self) -> bool:
        """Whether units are let go of while the request runs."""
        return True

    @abstractmethod
    def release_skipped(self, row: int, computed: int) -> None:
        """Lets go of units that no token after the first `computed` reads."""

    @abstractmethod
    def trim(self, part: HitPart, computed: int) -> HitPart:
        """The part of a hit that is still of use once `computed` tokens are known,
        externally computed ones included.
        """

    @abstractmethod
    def units_needed(self, row: int, part: HitPart, span: Span) -> int:
        """New units a step takes, for row -1: of a request that starts with this part of a hit."""

    @abstractmethod
    def extend(self, row: int, num_units: int, span: Span) -> None:
        """Takes the units that `units_needed` counted, at least one, from the pool: all in one call."""

    # Caching

    @abstractmethod
    def finder(self, hashes: list[bytes]) -> Finder:
        """Starts a look-up of the prompt with these hashes."""

    @abstractmethod
    def cache(self, row: int, filled: "Filled") -> None:
        """Records what a row has completed."""

    def cache_rows(self, rows: NDArray[np.intp], filled: Sequence["Filled"]) -> None:
        """`cache` for many rows."""
        for row, one in zip(rows.tolist(), filled, strict=True):
            self.cache(row, one)

    @abstractmethod
    def keep_boundary(self, row: int, hashes: list[bytes], boundary: int) -> None:
        """What serves a hit of `boundary` tokens is wanted from now on."""

    def left_behind(self, row: int, hashes: list[bytes], boundaries: Sequence[int]) -> Units:
        """Free units with wanted content that serve hits at these boundaries, descending, of the row's
        tokens, the last ones first.
        """
        ends = self.ends_let_go_of(row, boundaries)
        if not ends:
            return NOTHING
        unit, units, pool = self.context.hash_block_size, self.index.units, self.pool
        leaders: list[int] = []
        ranks: list[int] = []
        for end in ends:
            leader = units.get(hashes[end // unit - 1])
            if leader is not None and pool.holders.item(leader) < 0 and pool.strong.item(leader):
                leaders.append(leader)
                ranks.append(-end)
        return Units(leaders, ranks) if leaders else NOTHING

    @abstractmethod
    def ends_let_go_of(self, row: int, boundaries: Sequence[int]) -> Sequence[int]:
        """Tokens, descending, at which units end that serve hits at these boundaries, descending, and that
        the row may have let go of.
        """

    @abstractmethod
    def capacity(self, row: int) -> int:
        """Tokens the row can reach without any work on it."""

    @abstractmethod
    def next_cached(self, row: int) -> int:
        """Tokens at which the row has something new to cache."""

    # All rows of a decode step

    @abstractmethod
    def capacities(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        """`capacity` of many rows: int64[n]."""

    @abstractmethod
    def next_cacheable(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        """`next_cached` of many rows: int64[n]."""

    @abstractmethod
    def release_rows(self, rows: NDArray[np.intp], computed: NDArray[np.int64]) -> None:
        """`release_skipped` for many rows."""

    @abstractmethod
    def rewind(self, rows: NDArray[np.intp], num_tokens: NDArray[np.int64]) -> None:
        """Only int[n] `num_tokens` of the tokens that the rows' last step computed stand."""

    @abstractmethod
    def needed_rows(
        self, rows: NDArray[np.intp], after: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """int64[n]: new units each row takes to reach `after` tokens, with room for `slots`."""

    @abstractmethod
    def extend_rows(
        self, rows: NDArray[np.intp], num_units: NDArray[np.int64], after: NDArray[np.int64]
    ) -> None:
        """`extend` for many rows."""
