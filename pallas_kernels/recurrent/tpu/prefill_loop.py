"""Prefill on a TPU: chunk after chunk of one slab of channels, with the state staying in VMEM in between."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.tpu.schedule import Chunks
from pallas_kernels.recurrent.tpu.slabs import SlabPlan, StatePages, state_pages
from pallas_kernels.recurrent.tpu.step import Step


class Operand(NamedTuple):
    """An array and the block of it that a step sees: `at(chunk, slab)` in blocks. `in_smem`: scalars."""

    array: jax.Array
    block: tuple[int, ...]
    at: Callable[[Any, Any], tuple[Any, ...]]
    in_smem: bool = False

    def spec(self, at: Callable[..., tuple[Any, ...]]) -> pl.BlockSpec:
        """Its block spec with the index map `at`."""
        if self.in_smem:
            return pl.BlockSpec(self.block, at, memory_space=pltpu.SMEM)
        return pl.BlockSpec(self.block, at)


class PrefillResult(NamedTuple):
    """Outputs of chunks, of any value for chunks that are not live, and the pool."""

    out: jax.Array
    pages: jax.Array


@dataclass(frozen=True, kw_only=True)
class PrefillLoop:
    """All chunks of prefill sequences. Operands are indexed by `at(chunk, slab)`.

    state_shape: a slab of the state in float32. unpack(words ref, state ref), pack(state ref, words ref): a
    slab's words and its state. compute(state ref, num_tokens, operand refs, out_ref): one chunk.
    """

    num_slabs: int
    state_shape: tuple[int, ...]
    unpack: Callable[..., None]
    pack: Callable[..., None]
    compute: Callable[..., None]
    out: Operand
    name: str

    def run(
        self,
        operands: list[Operand],
        chunks: Chunks,
        step: Step,
    ) -> PrefillResult:
        """Steps over chunks, slab by slab."""
        pages, batch, table, place, interpret = step
        rows, kept = table.checkpoint_lens.shape
        real = jnp.arange(rows) < batch.num_seqs
        plan = SlabPlan.of(place, self.num_slabs)
        scalars = (
            *(chunks.num_live, chunks.seq, chunks.num_tokens, chunks.opens, chunks.closes, chunks.seq_len),
            *state_pages(table.read, real, place),
            *state_pages(table.write, real, place),
        )
        if kept:
            wanted = jnp.broadcast_to(real[:, None], table.checkpoint_lens.shape)
            scalars += (
                table.checkpoint_lens.reshape(-1),
                *state_pages(table.checkpoint, wanted, place),
            )

        def spec(operand: Operand) -> pl.BlockSpec:
            # Chunks that are not live ask for the last live one's block, so nothing is copied for them.
            def at(slab, chunk, num_live, *_):
                return operand.at(jnp.minimum(chunk, jnp.maximum(num_live[0] - 1, 0)), slab)

            return operand.spec(at)

        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        out, pages = pl.pallas_call(
            lambda *refs: self._kernel(plan, kept, len(operands), *refs),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=(self.num_slabs, chunks.seq.shape[0]),
                in_specs=[*(spec(operand) for operand in operands), anywhere],
                out_specs=[spec(self.out), anywhere],
                scratch_shapes=[
                    pltpu.VMEM((plan.rows, LANES), jnp.uint32),
                    pltpu.VMEM(self.state_shape, jnp.float32),
                    pltpu.SemaphoreType.DMA(()),
                ],
            ),
            out_shape=[
                jax.ShapeDtypeStruct(self.out.array.shape, jnp.float32),
                jax.ShapeDtypeStruct(pages.shape, pages.dtype),
            ],
            input_output_aliases={len(scalars) + len(operands): 1},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary", "arbitrary"), disable_bounds_checks=True
            ),
            interpret=interpret,
            name=self.name,
        )(*scalars, *(operand.array for operand in operands), pages)
        return PrefillResult(out, pages)

    def _kernel(self, plan: SlabPlan, kept: int, num_operands: int, *refs) -> None:
        num_live_ref, seq_ref, num_tokens_ref, opens_ref, closes_ref, seq_len_ref, *refs = refs
        read_ids, read_live, write_ids, write_live, *refs = refs
        reads, writes = StatePages(read_ids, read_live), StatePages(write_ids, write_live)
        checkpoint_refs, refs = refs[: 3 if kept else 0], refs[3 if kept else 0 :]
        operand_refs, (_, out_ref, pages_ref, words, state_ref, semaphore) = (
            refs[:num_operands],
            refs[num_operands:],
        )
        slab, chunk = pl.program_id(0), pl.program_id(1)

        def store(states, state):
            self.pack(state_ref, words)
            plan.start(pages_ref, states, state, slab, words, semaphore, to_pool=True)
            plan.wait(states, state, words, semaphore)

        @pl.when(chunk < num_live_ref[0])
        def _():
            seq = seq_ref[chunk]

            @pl.when(opens_ref[chunk] == 1)
            def _():
                plan.start(pages_ref, reads, seq, slab, words, semaphore, to_pool=False)
                plan.wait(reads, seq, words, semaphore)
                plan.clear(reads, seq, words)
                self.unpack(words, state_ref)

            self.compute(state_ref, num_tokens_ref[chunk], operand_refs, out_ref)
            for index in range(kept):
                lens_ref, *states = checkpoint_refs
                state = seq * kept + index

                @pl.when((lens_ref[state] == seq_len_ref[chunk]) & (num_tokens_ref[chunk] > 0))
                def _(state=state, states=states):
                    store(StatePages(*states), state)

            @pl.when(closes_ref[chunk] == 1)
            def _():
                store(writes, seq)
