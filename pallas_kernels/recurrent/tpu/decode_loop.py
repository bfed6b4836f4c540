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

from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.tpu.slabs import SlabPlan, StatePages, state_pages
from pallas_kernels.recurrent.tpu.step import Step

BUFFERS = 3
"""Slabs in flight each way. With two, a chip that is quicker than its memory waits for a copy's latency."""


TOGETHER = 8
"""Sequences whose operands are copied at once: a copy for each would take longer than a step computes."""


class DecodeOperand(NamedTuple):
    """An array `[S, slabs or fewer, ...]`: a step sees `[1, 1, ...]` of it, or (`shared`) all of it.

    at: a slab's place on the second axis. in_smem: scalars.
    """

    array: jax.Array
    at: Callable[[Any], Any] = lambda slab: slab
    in_smem: bool = False
    shared: bool = False

    def spec(self, first_seq: Callable[..., Any]) -> pl.BlockSpec:
        """Blocks of some sequences: `first_seq(step, ...)` is the number of the first one's block."""
        zeros = (0,) * (self.array.ndim - 1)
        memory: Any = {"memory_space": pltpu.SMEM} if self.in_smem else {}
        if self.shared:
            return pl.BlockSpec(self.array.shape, lambda *_: (0, *zeros), **memory)
        block = (min(TOGETHER, self.array.shape[0]), *self.array.shape[1:])
        return pl.BlockSpec(block, lambda *at: (first_seq(*at), *zeros), **memory)

    def view(self, ref: Any, seq: Any, slab: Any) -> Any:
        """What a step sees of a block."""
        if self.shared:
            return ref
        return ref.at[pl.ds(seq % ref.shape[0], 1), pl.ds(self.at(slab), 1)]


class DecodeResult(NamedTuple):
    """Outputs `[S, ...]`, of any value for rows that are not decodes, and the pool."""

    out: jax.Array
    pages: jax.Array


@dataclass(frozen=True, kw_only=True)
class DecodeLoop:
    """One token of every decode. `compute(in_buffer, out_buffer, operand refs, out_ref)` does one slab.

    out: an operand of the shape of the outputs.
    """

    num_slabs: int
    compute: Callable[..., None]
    out: DecodeOperand
    name: str

    def run(
        self,
        operands: list[DecodeOperand],
        step: Step,
    ) -> DecodeResult:
        """Steps over all rows of the table; only decodes cost anything."""
        pages, batch, table, place, interpret = step
        rows, kept = table.checkpoint_lens.shape
        decodes = jnp.arange(rows) < batch.num_decodes
        plan = SlabPlan.of(place, self.num_slabs)
        reached = decodes[:, None] & (table.checkpoint_lens == batch.seq_lens[:, None])
        scalars = (
            (batch.num_decodes * self.num_slabs).reshape(1).astype(jnp.int32),
            *state_pages(table.read, decodes, place),
            *state_pages(table.write, decodes, place),
            *(state_pages(table.checkpoint, reached, place) if kept else ()),
        )

        def first_seq(step, num_live, *_):
            # Steps that are not live ask for the last live one's block, so nothing is copied for them.
            step = jnp.minimum(step, jnp.maximum(num_live[0] - 1, 0))
            return step // self.num_slabs // min(TOGETHER, rows)

        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        buffer = pltpu.VMEM((BUFFERS, plan.rows, LANES), jnp.uint32)
        out, pages = pl.pallas_call(
            lambda *refs: self._kernel(plan, kept, operands, *refs),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=(rows * self.num_slabs,),
                in_specs=[*(operand.spec(first_seq) for operand in operands), anywhere],
                out_specs=[self.out.spec(first_seq), anywhere],
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

    def _kernel(self, plan: SlabPlan, kept: int, operands: list[DecodeOperand], *refs) -> None:
        num_live_ref, read_ids, read_live, write_ids, write_live, *refs = refs
        reads, writes = StatePages(read_ids, read_live), StatePages(write_ids, write_live)
        checkpoints = None
        if kept:
            kept_ids, kept_live, *refs = refs
            checkpoints = StatePages(kept_ids, kept_live)
        operand_refs, (_, out_ref, pages_ref, *scratch) = refs[: len(operands)], refs[len(operands) :]
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

            views = [
                operand.view(ref, *at(step))
                for operand, ref in zip([*operands, self.out], [*operand_refs, out_ref], strict=True)
            ]
            self.compute(in_buffer, out_buffer, views[:-1], views[-1])
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
