"""A small part of many states on its way through VMEM, for a whole group of sequences at once."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.tpu.copies import PartTables
from pallas_kernels.recurrent.tpu.slabs import SlabPlan

GROUPS = 2
"""Groups in flight each way: while one is computed, the next is on its way in and the one before out."""


class GroupCopies(NamedTuple):
    """Copies of a part that is one slab, for the decodes of a group of `together` sequences.

    inward, outward `uint32[GROUPS, together, rows, 128]` in VMEM; the semaphores `[GROUPS]` each.
    """

    plan: SlabPlan
    tables: PartTables
    together: int
    pages_ref: Any
    inward: Any
    outward: Any
    arrivals: Any
    departures: Any

    @staticmethod
    def scratch(plan: SlabPlan, together: int) -> list[Any]:
        """The shapes of `inward`, `outward`, `arrivals` and `departures`."""
        buffer = pltpu.VMEM((GROUPS, together, plan.rows, LANES), jnp.uint32)
        semaphores = pltpu.SemaphoreType.DMA((GROUPS,))
        return [buffer, buffer, semaphores, semaphores]

    def fetch(self, group: Any) -> None:
        """Asks for a group, which may be the one after the last."""
        buffers, semaphore = self.inward.at[group % GROUPS], self.arrivals.at[group % GROUPS]
        for row, seq in self._rows(group):
            reads = self.tables.reads
            self.plan.start(self.pages_ref, reads, row, 0, buffers.at[seq], semaphore, to_pool=False)

    def take(self, group: Any) -> Any:
        """The group's buffers `[together, rows, 128]`, all there: zeros for a state that is not real."""
        buffers, semaphore = self.inward.at[group % GROUPS], self.arrivals.at[group % GROUPS]
        for row, seq in self._rows(group):
            self.plan.wait(self.tables.reads, row, buffers.at[seq], semaphore)
        for row, seq in self._rows(group):
            self.plan.clear(self.tables.reads, row, buffers.at[seq])
        return buffers

    def room(self, group: Any) -> Any:
        """The buffers for what becomes of the group, once what was in them has gone."""

        @pl.when(group >= GROUPS)
        def _():
            self._wait_until_gone(group - GROUPS)

        return self.outward.at[group % GROUPS]

    def give(self, group: Any) -> None:
        """Writes the group, now in `room`."""
        buffers, semaphore = self.outward.at[group % GROUPS], self.departures.at[group % GROUPS]
        for row, seq in self._rows(group):
            writes = self.tables.writes
            self.plan.start(self.pages_ref, writes, row, 0, buffers.at[seq], semaphore, to_pool=True)

        def keep(seq, _) -> None:
            row = group * self.together + seq
            self.tables.keep(self.plan, self.pages_ref, row, 0, buffers.at[seq], semaphore)

        if self.tables.checkpoints is not None:
            lax.fori_loop(0, self.together, keep, None)

    def close(self, group: Any) -> None:
        """Waits for what the groups up to the last one, `group`, have written."""
        first = jnp.maximum(group - GROUPS + 1, 0)
        lax.fori_loop(first, group + 1, lambda each, _: self._wait_until_gone(each), None)

    def _wait_until_gone(self, group: Any) -> None:
        buffers, semaphore = self.outward.at[group % GROUPS], self.departures.at[group % GROUPS]
        for row, seq in self._rows(group):
            self.plan.wait(self.tables.writes, row, buffers.at[seq], semaphore)

    def _rows(self, group: Any) -> list[tuple[Any, int]]:
        """Rows of the group's sequences, and their numbers in it. Those that are no decodes are not real."""
        return [(group * self.together + seq, seq) for seq in range(self.together)]
