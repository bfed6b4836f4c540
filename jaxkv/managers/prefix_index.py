"""From hashes to cached units, for one manager."""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.pool import BlockPool

NOT_READY = -1


class _Recorded(NamedTuple):
    """A unit that holds a prefix in its leading tokens, and the first step that may read them."""

    leader: int
    ready_step: int


class PrefixIndex:
    """Which unit holds the block that ends a prefix of a given hash.

    units: hash -> leader. Where two units have one hash both are kept; the first one cached is found. Read it
    directly: `map(index.units.get, hashes)` is the fastest look-up there is.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.units: dict[bytes, int] = {}
        self._duplicates: dict[bytes, list[int]] = {}
        self._partial: dict[bytes, list[_Recorded]] = {}
        self._partial_hashes: dict[int, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self.units)

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
        gone: list[bytes] = self._pool.hash_of[leaders].tolist()
        self._pool.hash_of[leaders] = None
        if self._partial_hashes:
            for leader in leaders.tolist():
                self._remove_partial(leader)
            # A block that is recorded for its leading tokens alone has no hash of its own.
            gone, leaders = _without_none(gone, leaders)
        if self._duplicates:
            gone = self._pass_on(gone, leaders.tolist())
        units = self.units
        for block_hash in gone:
            del units[block_hash]
        return gone

    def _remove_one(self, leader: int) -> list[bytes]:
        """`remove` of one unit."""
        if self._partial_hashes or self._duplicates:
            return self.remove(np.array([leader]))
        gone: bytes = self._pool.hash_of[leader]
        del self.units[gone]
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
            self.units[block_hash] = same[0]
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
        # The first hash that is not cached ends the run; what was found before it stays in the list.
        with contextlib.suppress(KeyError):
            found.extend(map(self.units.__getitem__, hashes))
        return found

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
