"""Full attention and latent caches: every block of the sequence is held until the request ends."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxkv.managers.base import Filled, Finder, HitPart
from jaxkv.managers.partial import find_inside
from jaxkv.managers.positional import PositionalManager
from jaxkv.specs import cdiv


class FullAttentionManager(PositionalManager):
    """A hit of L needs every block of [0, L)."""

    @property
    def gives_back(self) -> bool:
        return False

    def first_needed(self, length: int) -> int:
        return 0

    def skipped_tokens(self, computed: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.zeros_like(computed)

    def wanted(self, start: int, stop: int, boundaries: Sequence[int]) -> bool:
        return True

    def wanted_last(self, stops: list[int], filled: Sequence[Filled]) -> bool:
        return True

    def unwant_beyond(self, row: int, num_tokens: int) -> None:
        """The row's blocks after its first `num_tokens` tokens are not wanted, unless others hold them."""
        first, pool = cdiv(num_tokens + self.eagle_margin, self.block_size), self.pool
        for leader in self.ids[0, row, first : self.count.item(row)].tolist():
            if pool.holders.item(leader) == 1:
                pool.strong[leader] = False

    def finder(self, hashes: list[bytes]) -> "FullFinder":
        return FullFinder(self, hashes)


class FullFinder(Finder):
    """Scans the prompt once, from the left; whatever is shorter than the run found can be served too."""

    def __init__(self, manager: FullAttentionManager, hashes: list[bytes]) -> None:
        self._manager = manager
        self._hashes = hashes
        scale = manager.hashes_per_block
        keys = hashes if scale == 1 else hashes[scale - 1 :: scale]
        self._run = manager.index.run(keys)

    def longest(self, limit: int) -> int:
        margin = self._manager.eagle_margin
        length = max(0, self._covered(limit + margin) - margin)
        if margin and length % self._manager.block_size:
            # What comes after the hit proves it, ready or not, but the block it ends in has to be copied.
            return self._inside(length // self._manager.block_size, length)
        return length

    def _covered(self, limit: int) -> int:
        size = self._manager.block_size
        whole = min(limit // size, len(self._run))
        if not self._manager.context.fine_grained or whole * size == limit:
            return whole * size
        return self._inside(whole, limit)

    def _inside(self, block: int, limit: int) -> int:
        """Tokens up to `limit`, which is inside the block, that can be copied from somewhere."""
        inside = find_inside(self._manager, self._hashes, block, limit)
        self.waits = self.waits or inside.waits
        return inside.length

    def needs(self, length: int) -> int:
        return cdiv(length, self._manager.block_size)

    def part(self, length: int) -> HitPart:
        whole = length // self._manager.block_size
        copy_from = -1
        if length % self._manager.block_size:
            copy_from = find_inside(self._manager, self._hashes, whole, length).leader
        return HitPart(0, np.fromiter(self._run, np.int32, whole), copy_from, length)
