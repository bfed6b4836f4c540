"""Look-ups of recurrent states."""

from typing import TYPE_CHECKING

import numpy as np

from jaxkv.managers.base import Finder, HitPart
from jaxkv.specs import cdiv

if TYPE_CHECKING:
    from jaxkv.managers.mamba import MambaManager


class StateFinder(Finder):
    """Looks for a state from the right; states are only kept at multiples of the alignment."""

    def __init__(self, manager: "MambaManager", hashes: list[bytes]) -> None:
        self._manager = manager
        self._hashes = hashes

    def longest(self, limit: int) -> int:
        context = self._manager.context
        units, unit, alignment = self._manager.index.units, context.hash_block_size, context.alignment
        if not units:
            return 0
        limit = min(limit, len(self._hashes) * unit) // alignment * alignment
        ready = self._manager.pool.ready_step
        for length in range(limit, 0, -alignment):
            leader = units.get(self._hashes[length // unit - 1])
            if leader is None:
                continue
            if ready[leader] <= context.clock.step:
                return length
            # It is the state another request has when the running step ends: too late for this one to start
            # from.
            self.waits = True
        return 0

    def needs(self, length: int) -> int:
        return 1 if length else 0

    def part(self, length: int) -> HitPart:
        leader = self._manager.index.units[self._hashes[length // self._manager.context.hash_block_size - 1]]
        first = cdiv(length, self._manager.block_size) - 1
        return HitPart(first, np.array([leader], np.int32), length=length)
