"""Blocks that the device must copy before a step, because a hit ends inside them."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.managers import Manager


class BlockCopies(NamedTuple):
    """Copy whole blocks, all layer slots: int32[n] each. Read every source before writing any target."""

    sources: NDArray[np.int32]
    targets: NDArray[np.int32]


class PendingCopies:
    """Copies that the next step has to make.
    The sources are held until a step later, so nobody reuses them.
    """

    def __init__(self) -> None:
        self._sources: list[NDArray[np.int32]] = []
        self._targets: list[NDArray[np.int32]] = []
        self._held: list[tuple[Manager, NDArray[np.int32]]] = []

    def hold(self, manager: Manager, source: int) -> None:
        """Holds the unit of leader `source` until the copy has been made."""
        leader = np.array([source], np.int32)
        manager.pool.touch(manager.number, leader)
        self._held.append((manager, leader))

    def add(self, manager: Manager, source: int, targets: NDArray[np.int32]) -> None:
        """A unit to copy, which is held, to int32[width] ids of a new one."""
        leader = np.array([source], np.int32)
        self._sources.append(manager.pool.members(manager.number, leader)[:, 0].copy())
        self._targets.append(targets.copy())

    def drop(self, targets: Collection[int]) -> None:
        """Takes back copies into any of these blocks: their content comes from elsewhere."""
        copies = zip(self._sources, self._targets, strict=True)
        kept = [copy for copy in copies if not set(targets).intersection(copy[1].tolist())]
        self._sources, self._targets = [copy[0] for copy in kept], [copy[1] for copy in kept]

    def take(self) -> BlockCopies:
        """What to copy before the step that is being scheduled; empties the list."""
        if not self._sources:
            return BlockCopies(np.empty(0, np.int32), np.empty(0, np.int32))
        copies = BlockCopies(np.concatenate(self._sources), np.concatenate(self._targets))
        self._sources, self._targets = [], []
        return copies

    def release_sources(self) -> None:
        """The copies have been made: lets go of what they read."""
        for manager, leader in self._held:
            manager.pool.let_go_one(int(leader[0]))
        self._held = []

    def held(self) -> list[tuple[int, int]]:
        """Pairs of manager number and leader that copies hold."""
        return [(manager.number, int(leader[0])) for manager, leader in self._held]
