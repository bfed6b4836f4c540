"""Units that have become complete, held until what they contain has been saved outside the pool."""

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from jaxkv.managers.base import Manager


class ComputedUnit(NamedTuple):
    """A unit of one manager, and the hash of the prefix that ends with it."""

    manager: "Manager"
    block_hash: bytes
    leader: int


class _Batch(NamedTuple):
    manager: "Manager"
    hashes: list[bytes]
    leaders: NDArray[np.integer]
    step: int


class ComputedUnits:
    """A queue of what scheduled steps complete, in the order of the steps.

    are_wanted: whether anybody takes them out again; otherwise nothing is kept here.
    """

    def __init__(self) -> None:
        self.are_wanted = False
        self._batches: deque[_Batch] = deque()

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(self, manager: "Manager", hashes: list[bytes], leaders: NDArray[np.integer], step: int) -> None:
        """Different units that step number `step`, or an earlier one, completes. Each gets a holder more."""
        manager.pool.touch(manager.number, leaders)
        self._batches.append(_Batch(manager, hashes, leaders.copy(), step))

    def of_steps_up_to(self, step: int) -> Iterator[ComputedUnit]:
        """The units of these steps, which have run; they stay held."""
        for batch in self._batches:
            if batch.step > step:
                return
            for block_hash, leader in zip(batch.hashes, batch.leaders.tolist(), strict=True):
                yield ComputedUnit(batch.manager, block_hash, leader)

    def let_go_up_to(self, step: int) -> None:
        """Takes the units of these steps out of the queue."""
        while self._batches and self._batches[0].step <= step:
            batch = self._batches.popleft()
            batch.manager.let_go(batch.leaders)

    @property
    def some_come_back(self) -> bool:
        """Whether nobody else holds some of the units any more."""
        return any((b.manager.pool.holders[b.leaders] == 1).any() for b in self._batches)

    def held(self) -> list[tuple[int, int]]:
        """Pairs of manager number and leader, one for each holder that is counted here."""
        return [(b.manager.number, leader) for b in self._batches for leader in b.leaders.tolist()]
