"""From hashes to cached units, for one manager."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.pool import BlockPool

NOT_READY = -1

_MOST_LATE = 32
"""So many batches of units wait at most to be entered."""


class _Recorded(NamedTuple):
    """A unit that holds a prefix in its leading tokens, and the first step that may read them."""

    leader: int
    ready_step: int


class _Batch(NamedTuple):
    """Units that are not entered yet. number: above 0, and above those of all earlier batches."""

    number: int
    hashes: list[bytes]
    leaders: NDArray[np.integer]


class PrefixIndex:
    """Which unit holds the block that ends a prefix of a given hash.

    Units that are likely to be given out before anybody looks for them can be added without being entered:
    that follows when the index is first read or added to otherwise, for those that are still there.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._units: dict[bytes, int] = {}
        self._late: list[_Batch] = []
        self._num_batches = 0
        # By leader: the batch in which a unit waits to be entered, 0 for all others.
        self._batch_of: NDArray[np.int64] = np.zeros(pool.num_blocks, np.int64)
        self._duplicates: dict[bytes, list[int]] = {}
        self._partial: dict[bytes, list[_Recorded]] = {}
        self._partial_hashes: dict[int, list[bytes]] = {}

    @property
    def units(self) -> dict[bytes, int]:
        """hash -> leader. Where two units have one hash both are kept; the first one cached is found. Read it
        directly: `map(index.units.get, hashes)` is the fastest look-up there is.
        """
        if self._late:
            self._enter_late()
        return self._units

    def __len__(self) -> int:
        return len(self.units)

    def hash_of(self, leader: int) -> bytes | None:
        """The hash that a unit is found by; None for one without."""
        if self._late:
            self._enter_late()
        return self._pool.hash_of.item(leader)

    def add_late(self, hashes: list[bytes], leaders: NDArray[np.integer]) -> None:
        """`add` that costs little as long as nobody reads the index."""
        if len(self._late) == _MOST_LATE:
            self._enter_late()
        self._num_batches += 1
        self._batch_of[leaders] = self._num_batches
        self._late.append(_Batch(self._num_batches, hashes, leaders))

    def _enter_late(self) -> None:
        """Enters the units that have waited and were not forgotten meanwhile."""
        late, self._late = self._late, []
        for number, hashes, leaders in late:
            there = self._batch_of[leaders] == number
            self._batch_of[leaders[there]] = 0
            if not there.all():
                hashes = [block_hash for block_hash, is_there in zip(hashes, there, strict=True) if is_there]
                leaders = leaders[there]
            if hashes:
                self.add(hashes, leaders)

    def _forget_late(self, leaders: NDArray[np.integer]) -> NDArray[np.integer]:
        """Forgets units that have not been entered; returns the others."""
        batches = self._batch_of[leaders]
        self._batch_of[leaders] = 0
        return leaders[batches == 0]

    def add(self, hashes: list[bytes], leaders: NDArray[np.integer]) -> None:
        """Records units that were not in the index. Some may be equal: of two requests that decode alike."""
        self._pool.hash_of[leaders] = np.fromiter(hashes, np.object_, len(hashes))
        new = leaders.tolist()
        found = list(map(self.units.setdefault, hashes, new))
        if found != new:
            for block_hash, leader, first in zip(hashes, new, found, strict=True):
                if first != leader:
                    self._duplicates.setdefault(block_hash, [first]).append(leader)

    def add_one(self, block_hash: bytes, leader: int) -> None:
        """`add` of one unit."""
        self._pool.hash_of[leader] = block_hash
        first = self.units.setdefault(block_hash, leader)
        if first != leader:
            self._duplicates.setdefault(block_hash, [first]).append(leader)

    def remove(self, leaders: NDArray[np.integer] | int) -> list[bytes]:
        """Forgets units, or one; returns the hashes that no unit has any more."""
        if isinstance(leaders, int):
            return self._remove_one(leaders)
        if self._late:
            leaders = self._forget_late(leaders)
            if not len(leaders):
                return []
        gone: list[bytes] = self._pool.hash_of[leaders].tolist()
        self._pool.hash_of[leaders] = None
        if self._partial_hashes:
            for leader in leaders.tolist():
                self._remove_partial(leader)
            # A block that is recorded for its leading tokens alone has no hash of its own.
            gone, leaders = _without_none(gone, leaders)
        if self._duplicates:
            gone = self._pass_on(gone, leaders.tolist())
        units = self._units
        for block_hash in gone:
            del units[block_hash]
        return gone

    def _remove_one(self, leader: int) -> list[bytes]:
        """`remove` of one unit."""
        if self._partial_hashes or self._duplicates or self._late:
            return self.remove(np.array([leader]))
        gone: bytes = self._pool.hash_of[leader]
        del self._units[gone]
        self._pool.hash_of[leader] = None
        return [gone]

    def _pass_on(self, hashes: list[bytes], leaders: list[int]) -> list[bytes]:
        """Gives hashes of forgotten units to other units that have them; returns those that no other has."""
        gone: list[bytes] = []
        for block_hash, leader in zip(hashes, leaders, strict=True):
            same = self._duplicates.get(block_hash)
            if same is None:
                gone.append(block_hash)
                continue
            same.remove(leader)
            self._units[block_hash] = same[0]
            if len(same) == 1:
                del self._duplicates[block_hash]
        return gone

    def add_partial(self, leader: int, hashes: list[bytes], ready_step: int) -> None:
        """Records that the unit's leading tokens end prefixes of these hashes, each shorter than its
        block, and from which step on they may be read before it runs: a block fills over many steps.
        """
        for block_hash in hashes:
            self._partial.setdefault(block_hash, []).append(_Recorded(leader, ready_step))
        self._partial_hashes.setdefault(leader, []).extend(hashes)

    def find_partial(self, block_hash: bytes, step: int) -> int | None:
        """A unit whose leading tokens end the prefix: NOT_READY where step `step` is too early to read
        them, None where there is none.
        """
        found = self._partial.get(block_hash)
        if not found:
            return None
        return next((leader for leader, ready_step in found if ready_step <= step), NOT_READY)

    def run(self, hashes: list[bytes]) -> list[int]:
        """Leaders of the leading hashes that are all cached."""
        found: list[int] = []
        try:
            found.extend(map(self.units.__getitem__, hashes))
        except KeyError:
            # The first hash that is not cached ends the run; what was found before it is in the list.
            return found
        return found

    def fault(self, cached: set[int]) -> str | None:
        """What is wrong with the records of equal units and of leading tokens, if anything is.

        cached: leaders of all units that the pool has as cached here.
        """
        units_of: dict[bytes, set[int]] = {}
        for leader in cached:
            block_hash = self.hash_of(leader)
            if block_hash is not None:
                units_of.setdefault(block_hash, set()).add(leader)
        equal = {block_hash: leaders for block_hash, leaders in units_of.items() if len(leaders) > 1}
        if equal != {block_hash: set(leaders) for block_hash, leaders in self._duplicates.items()}:
            return f"{len(equal)} hashes have several units, not the {len(self._duplicates)} recorded ones"
        recorded: dict[int, set[bytes]] = {}
        for block_hash, found in self._partial.items():
            for leader, _ in found:
                recorded.setdefault(leader, set()).add(block_hash)
        if recorded != {leader: set(hashes) for leader, hashes in self._partial_hashes.items()}:
            return "prefixes that end inside blocks do not agree with the blocks that they end in"
        if not recorded.keys() <= cached:
            return f"a prefix ends inside block {min(recorded.keys() - cached)}, which is not cached"
        return None

    def _remove_partial(self, leader: int) -> None:
        for block_hash in self._partial_hashes.pop(leader, ()):
            same = [recorded for recorded in self._partial[block_hash] if recorded.leader != leader]
            if same:
                self._partial[block_hash] = same
            else:
                del self._partial[block_hash]


def _without_none(
    hashes: Sequence[bytes | None], leaders: NDArray[np.integer]
) -> tuple[list[bytes], NDArray[np.integer]]:
    kept = [block_hash for block_hash in hashes if block_hash is not None]
    if len(kept) == len(hashes):
        return kept, leaders
    return kept, leaders[[block_hash is not None for block_hash in hashes]]
