"""Decodes on a TPU: one slab of one sequence's state after another, in and out of VMEM in three buffers each.

read     [s0][s1][s2]
compute          [s0][s1][s2]
write                [s0][s1][s2]
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.tpu.slabs import SlabPlan, StatePages, state_pages

BUFFERS = 3
"""Slabs in flight each way. With two, a chip that computes faster than it reads waits for a copy's latency."""


class Operand(NamedTuple):
    """An array and the block of it that a step sees: `at(seq, slab)` in blocks. `in_smem`: scalars."""

    array: jax.Array
    block: tuple[int, ...]
    at: Callable[[Any, Any], tuple[Any, ...]]
    in_smem: bool = False

    def spec(self, at: Callable[..., tuple[Any, ...]]) -> pl.BlockSpec:
        """Its block spec with the index map `at`."""
        if self.in_smem:
            return pl.BlockSpec(self.block, at, memory_space=pltpu.SMEM)
        return pl.BlockSpec(self.block, at)


class DecodeResult(NamedTuple):
    """Outputs `[S, ...]`, of any value for rows that are not decodes, and the pool."""

    out: jax.Array
    pages: jax.Array


@dataclass(frozen=True, kw_only=True)
class DecodeLoop:
    """One token of every decode. `compute(in_buffer, out_buffer, operand refs, out_ref)` does one slab.

    out: shape of the outputs and their block, as an operand's.
    """

    place: StatePlace
    num_slabs: int
    compute: Callable[..., None]
    out: Operand
    name: str

    def run(
        self,
        operands: list[Operand],
        pages: jax.Array,
        batch: RaggedBatch,
        table: StateTable,
        *,
        interpret: Any,
    ) -> DecodeResult:
        """Steps over all rows of the table; only decodes cost anything."""
        rows, kept = table.checkpoint_lens.shape
        decodes = jnp.arange(rows) < batch.num_decodes
        plan = SlabPlan.of(self.place, self.num_slabs)
        reached = decodes[:, None] & (table.checkpoint_lens == batch.seq_lens[:, None])
        scalars = (
            (batch.num_decodes * self.num_slabs).reshape(1).astype(jnp.int32),
            *state_pages(table.read, decodes, self.place),
            *state_pages(table.write, decodes, self.place),
            *(state_pages(table.checkpoint, reached, self.place) if kept else ()),
        )

        def spec(operand: Operand) -> pl.BlockSpec:
            # Steps that are not live ask for the last live one's block, so nothing is copied for them.
            def at(step, num_live, *_):
                step = jnp.minimum(step, jnp.maximum(num_live[0] - 1, 0))
                return operand.at(step // self.num_slabs, step % self.num_slabs)

            return operand.spec(at)

        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        buffer = pltpu.VMEM((BUFFERS, plan.rows, LANES), jnp.uint32)
        out, pages = pl.pallas_call(
            lambda *refs: self._kernel(plan, kept, len(operands), *refs),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=(rows * self.num_slabs,),
                in_specs=[*(spec(operand) for operand in operands), anywhere],
                out_specs=[spec(self.out), anywhere],
                scratch_shapes=[
                    buffer,
                    buffer,
                    pltpu.SemaphoreType.DMA((BUFFERS,)),
                    pltpu.SemaphoreType.DMA((BUFFERS,)),
                ],
            ),
            out_shape=[
                jax.ShapeDtypeStruct(self.out.array.shape, jnp.float32),
                jax.ShapeDtypeStruct(pages.shape, pages.dtype),
            ],
            input_output_aliases={len(scalars) + len(operands): 1},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary",), disable_bounds_checks=True
            ),
            interpret=interpret,
            name=self.name,
        )(*scalars, *(operand.array for operand in operands), pages)
        return DecodeResult(out, pages)

    def _kernel(self, plan: SlabPlan, kept: int, num_operands: int, *refs) -> None:
        num_live_ref, read_ids, read_live, write_ids, write_live, *refs = refs
        reads, writes = StatePages(read_ids, read_live), StatePages(write_ids, write_live)
        checkpoints = None
        if kept:
            kept_ids, kept_live, *refs = refs
            checkpoints = StatePages(kept_ids, kept_live)
        operand_refs, (_, out_ref, pages_ref, *scratch) = refs[:num_operands], refs[num_operands:]
        read_buffers, write_buffers, read_semaphores, write_semaphores = scratch
        step, num_live = pl.program_id(0), num_live_ref[0]

        def at(step):
            return step // self.num_slabs, step % self.num_slabs

        def fetch(step):
            slot = step % BUFFERS
            plan.start(
                pages_ref, reads, *at(step), read_buffers.at[slot], read_semaphores.at[slot], to_pool=False
            )

        def wait_for_write(step):
            slot = step % BUFFERS
            plan.wait(writes, at(step)[0], write_buffers.at[slot], write_semaphores.at[slot])

        @pl.when(step == 0)
        def _():
            for ahead in range(BUFFERS - 1):

                @pl.when(ahead < num_live)
                def _(ahead=ahead):
                    fetch(ahead)

        @pl.when(step + BUFFERS - 1 < num_live)
        def _():
            fetch(step + BUFFERS - 1)

        @pl.when(step < num_live)
        def _():
            slot = step % BUFFERS
            in_buffer, out_buffer = read_buffers.at[slot], write_buffers.at[slot]
            plan.wait(reads, at(step)[0], in_buffer, read_semaphores.at[slot])
            plan.clear(reads, at(step)[0], in_buffer)

            @pl.when(step >= BUFFERS)
            def _():
                wait_for_write(step - BUFFERS)

            self.compute(in_buffer, out_buffer, operand_refs, out_ref)
            for index in range(kept):
                assert checkpoints is not None
                state = at(step)[0] * kept + index
                semaphore = write_semaphores.at[slot]
                plan.start(pages_ref, checkpoints, state, at(step)[1], out_buffer, semaphore, to_pool=True)
                plan.wait(checkpoints, state, out_buffer, semaphore)
            plan.start(pages_ref, writes, *at(step), out_buffer, write_semaphores.at[slot], to_pool=True)

        @pl.when(step + 1 == num_live)
        def _():
            for behind in reversed(range(BUFFERS)):

                @pl.when(step >= behind)
                def _(behind=behind):
                    wait_for_write(step - behind)
