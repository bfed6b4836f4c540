"""What sliding windows and local chunks have in common: a hit needs a run of blocks that ends at it."""

import numpy as np

from jaxkv.managers.base import NO_UNITS, Finder, HitPart
from jaxkv.managers.partial import find_inside
from jaxkv.managers.positional import PositionalManager
from jaxkv.specs import cdiv


class WindowedManager(PositionalManager):
    """Lets go of blocks that are left behind; a hit of L needs the blocks of [first_needed(L), L)."""

    def finder(self, hashes: list[bytes]) -> "WindowedFinder":
        return WindowedFinder(self, hashes)

    def free_boundary(self, limit: int) -> int:
        """A length, at most `limit` and as large as can be told, that needs no block at all;
        0 always is one.
        """
        return 0


class WindowedFinder(Finder):
    """Tries lengths from the right. A block that is missing rules out every length whose run includes it."""

    def __init__(self, manager: WindowedManager, hashes: list[bytes]) -> None:
        self._manager = manager
        self._hashes = hashes
        fine = manager.context.fine_grained
        self._step = manager.context.hash_block_size if fine else manager.block_size
        # An answer found before: a coordinator asks for the same length again.
        self._found = 0

    def longest(self, limit: int) -> int:
        manager, hashes = self._manager, self._hashes
        size, scale, margin = manager.block_size, manager.hashes_per_block, manager.eagle_margin
        units, num_hashes = manager.index.units, len(hashes)
        length = self._candidate(limit)
        while length > 0:
            first = manager.first_needed(length)
            if length == self._found or (first >= length and not margin):
                return length
            # From the left: the further left a block is missing, the more lengths that rules out.
            stop = (length + margin) // size
            for block in range(first // size, stop):
                end = (block + 1) * scale
                if end > num_hashes or hashes[end - 1] not in units:
                    covered = self._covered(block, end * manager.context.hash_block_size - 1)
                    break
            else:
                covered = self._covered(stop, length + margin)
                if covered == length + margin and margin and length % size:
                    # What comes after the hit proves it, but the block it ends in has to be copied.
                    covered = self._covered(length // size, length) + margin
                if covered == length + margin:
                    self._found = length
                    return length
            length = self._candidate(max(covered - margin, manager.free_boundary(length - 1)))
        return 0

    def _candidate(self, limit: int) -> int:
        """The largest length up to `limit` that may be an answer."""
        return max(limit // self._step * self._step, self._manager.free_boundary(limit))

    def _covered(self, block: int, limit: int) -> int:
        """Tokens up to `limit` that can be served where the last of them are inside `block`,
        not all of it.
        """
        begin = block * self._manager.block_size
        if limit <= begin or not self._manager.context.fine_grained:
            return begin
        inside = find_inside(self._manager, self._hashes, block, limit)
        self.waits = self.waits or inside.waits
        return inside.length

    def needs(self, length: int) -> int:
        first = self._manager.first_needed(length)
        if first >= length:
            return 0
        return cdiv(length, self._manager.block_size) - first // self._manager.block_size

    def part(self, length: int) -> HitPart:
        manager = self._manager
        size, scale = manager.block_size, manager.hashes_per_block
        first, whole = manager.first_needed(length), length // size
        if first >= length:
            return HitPart(whole, NO_UNITS, length=length)
        units, hashes = manager.index.units, self._hashes
        leaders = [units[hashes[(block + 1) * scale - 1]] for block in range(first // size, whole)]
        copy_from = -1
        if length % size:
            copy_from = find_inside(manager, hashes, whole, length).leader
        return HitPart(first // size, np.array(leaders, np.int32), copy_from, length)
