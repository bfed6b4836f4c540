"""Slabs of one part of many states on their way through VMEM, a few buffers in and as many out.

The slab of a step is asked for AHEAD steps before. Its buffer out is free again BUFFERS steps after.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.tpu.slabs import SlabPlan, StatePages, state_pages

BUFFERS = 8
"""Slabs in flight each way, a power of two: a slot is then a mask of the step's number."""
AHEAD = BUFFERS - 1


class Checkpoints(NamedTuple):
    """Where decodes keep states, in SMEM: as many `states` for each sequence; whether it `reaches` any."""

    states: StatePages
    reaches: jax.Array


class PartTables(NamedTuple):
    """Where decodes read, write and keep states, in SMEM. All go on for `beyond` sequences that have none, so
    that steps may ask for more than there are. checkpoints: None where none can be kept.
    """

    reads: StatePages
    writes: StatePages
    checkpoints: Checkpoints | None

    @classmethod
    def of(cls, batch: RaggedBatch, table: StateTable, place: StatePlace, beyond: int) -> "PartTables":
        """Those of a step's decodes."""
        rows, kept = table.checkpoint_lens.shape
        decodes = jnp.arange(rows) < batch.num_decodes
        reads, writes = (state_pages(blocks, decodes, place) for blocks in (table.read, table.write))
        reads, writes = (x._replace(live=jnp.pad(x.live, (0, beyond))) for x in (reads, writes))
        if not kept:
            return cls(reads, writes, None)
        reached = decodes[:, None] & (table.checkpoint_lens == batch.seq_lens[:, None])
        reaches = jnp.pad(reached.any(axis=1).astype(jnp.int32), (0, beyond))
        return cls(reads, writes, Checkpoints(state_pages(table.checkpoint, reached, place), reaches))

    def keep(self, plan: SlabPlan, pages_ref: Any, seq: Any, slab: Any, buffer: Any, semaphore: Any) -> None:
        """Writes a sequence's slab to the checkpoints it reaches, and waits for that: for as many bytes, so
        that another write by the same semaphore may be under way. A loop, which costs nothing where there are
        none: conditions would be computed for each copy.
        """
        if self.checkpoints is None:
            return
        states, reaches = self.checkpoints
        kept = states.ids.shape[0] // self.reads.ids.shape[0]

        def one(index, _) -> None:
            state = seq * kept + index
            plan.start(pages_ref, states, state, slab, buffer, semaphore, to_pool=True)
            plan.wait(states, state, buffer, semaphore)

        lax.fori_loop(0, reaches[seq] * kept, one, None)


class Copies(NamedTuple):
    """Copies of a part, one slab a step: step s is slab `s % num_slabs` of sequence `s // num_slabs`.

    inward, outward `uint32[BUFFERS, rows, 128]` in VMEM; the semaphores `[BUFFERS]` each.
    """

    plan: SlabPlan
    tables: PartTables
    pages_ref: Any
    inward: Any
    outward: Any
    arrivals: Any
    departures: Any

    @staticmethod
    def scratch(plan: SlabPlan) -> list[Any]:
        """The shapes of `inward`, `outward`, `arrivals` and `departures`."""
        buffer = pltpu.VMEM((BUFFERS, plan.rows, LANES), jnp.uint32)
        semaphores = pltpu.SemaphoreType.DMA((BUFFERS,))
        return [buffer, buffer, semaphores, semaphores]

    def open(self, here: jax.Array) -> None:
        """Asks for the first AHEAD slabs if `here`. A loop: its turns cost nothing elsewhere."""
        lax.fori_loop(0, jnp.where(here, AHEAD, 0), lambda step, _: self._fetch(step), None)

    def take(self, step: jax.Array) -> Any:
        """The buffer with the step's slab, once it is there; zeros for a state that is not real."""
        seq, _ = self._at(step)
        buffer, semaphore = self.inward.at[_slot(step)], self.arrivals.at[_slot(step)]
        self.plan.wait(self.tables.reads, seq, buffer, semaphore)
        self.plan.clear(self.tables.reads, seq, buffer)
        return buffer

    def room(self, step: jax.Array) -> Any:
        """The buffer for what becomes of the step's slab, once what was in it has gone."""

        @pl.when(step >= BUFFERS)
        def _():
            self._wait_until_gone(step - BUFFERS)

        return self.outward.at[_slot(step)]

    def give(self, step: jax.Array) -> None:
        """Writes the step's slab, now in `room`, and asks for the one AHEAD."""
        seq, slab = self._at(step)
        buffer, semaphore = self.outward.at[_slot(step)], self.departures.at[_slot(step)]
        self.plan.start(self.pages_ref, self.tables.writes, seq, slab, buffer, semaphore, to_pool=True)
        self._fetch(step + AHEAD)
        self.tables.keep(self.plan, self.pages_ref, seq, slab, buffer, semaphore)

    def close(self, here: jax.Array, num_steps: jax.Array) -> None:
        """Waits for the last slabs of `num_steps` if `here`."""
        first = jnp.where(here, jnp.maximum(num_steps - BUFFERS, 0), num_steps)
        lax.fori_loop(first, num_steps, lambda step, _: self._wait_until_gone(step), None)

    def _at(self, step: Any) -> tuple[Any, Any]:
        if self.plan.num_slabs == 1:
            return step, 0
        return lax.div(step, self.plan.num_slabs), lax.rem(step, self.plan.num_slabs)

    def _fetch(self, step: Any) -> None:
        buffer, semaphore = self.inward.at[_slot(step)], self.arrivals.at[_slot(step)]
        reads = self.tables.reads
        self.plan.start(self.pages_ref, reads, *self._at(step), buffer, semaphore, to_pool=False)

    def _wait_until_gone(self, step: Any) -> None:
        seq, _ = self._at(step)
        slot = _slot(step)
        self.plan.wait(self.tables.writes, seq, self.outward.at[slot], self.departures.at[slot])


def _slot(step: Any) -> Any:
    return step & (BUFFERS - 1)
