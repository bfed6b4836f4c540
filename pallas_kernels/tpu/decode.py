"""The decode kernel: one query for each sequence, over runs of its pages.

A run is up to `run_pages` pages of one sequence. A step takes `runs` of them, of one sequence or of several:
their products do not depend on each other, so the softmax of one hides behind the products of another. While
a step is computed, the pages of the next are on their way. Nothing but the lengths says which runs there are:
sequence after sequence, run after run.

A sequence's new token is put into the last page of its last run once that is there. Its rows go back to the
pool while the next runs are fetched and computed; nothing else in the kernel reads them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES
from pallas_kernels.outputs import AttentionResult
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.decode_math import DecodeMath
from pallas_kernels.tpu.new_rows import NewRows, RowWriter
from pallas_kernels.tpu.operands import clear_run, start_copies
from pallas_kernels.tpu.running import HIDDEN, Softmax


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """Static sizes: sequences of one grid step, runs of one step of its loop, pages of a run."""

    math: DecodeMath
    sequences: int
    runs: int
    run_pages: int
    table_width: int
    vmem_bytes: int


class DecodeScalars(NamedTuple):
    """What steers the kernel, int32 in SMEM: info `[2]` is the layer slot and the number of decodes."""

    info: jax.Array
    seq_lens: jax.Array
    first_block: jax.Array
    block_ids: jax.Array


class Run(NamedTuple):
    """Scalars of a run: sequence, its first table entry, whether there is one, whether it is the first."""

    seq: jax.Array
    entry: jax.Array
    live: jax.Array
    first: jax.Array


def attend_decodes(
    scalars: DecodeScalars,
    q: jax.Array,
    sinks: jax.Array | None,
    pages: jax.Array,
    plan: DecodePlan,
    settings: AttentionSettings,
    *,
    new: jax.Array | None = None,
    interpret: Any = False,
) -> AttentionResult:
    """Attention of arranged queries `[S, products, place_rows, key_width]`.

    Outputs `[S, products, place_rows, result_width]`, of which only rows of decodes are written. S is a
    multiple of `plan.sequences`. `sinks [products, rows, 128]` are the rows' tops before anything is seen, or
    None. `new` are images `[S, rows, 128]` of the last tokens (`NewRows`), which are written to the pool;
    None: it holds them already.
    """
    count, products, place_rows, width = q.shape
    used_rows = settings.layout.used_rows
    rows, out_width = plan.math.rows, plan.math.loader.result_width
    tops = jnp.full((products, rows, LANES), HIDDEN, jnp.float32) if sinks is None else sinks
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    new_spec, new_scratch = [], []
    if new is not None:
        image = (plan.sequences, *new.shape[1:])
        new_spec = [pl.BlockSpec(image, lambda i, *_: (i, 0, 0))]
        mixed = [pltpu.VMEM(image, jnp.uint32)] if NewRows(settings.layout).are_mixed else []
        new_scratch = [pltpu.SemaphoreType.DMA(()), *mixed]
    operands = [q, tops, *([] if new is None else [new]), pages]
    results = pl.pallas_call(
        partial(_kernel, plan, settings, new is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count // plan.sequences,),
            in_specs=[
                pl.BlockSpec((plan.sequences, products, place_rows, width), lambda i, *_: (i, 0, 0, 0)),
                pl.BlockSpec(tops.shape, lambda i, *_: (0, 0, 0)),
                *new_spec,
                anywhere,
            ],
            out_specs=[
                pl.BlockSpec((plan.sequences, products, place_rows, out_width), lambda i, *_: (i, 0, 0, 0)),
                *([] if new is None else [anywhere]),
            ],
            scratch_shapes=[
                pltpu.VMEM((2, plan.runs, plan.run_pages, used_rows, LANES), jnp.uint32),
                pltpu.VMEM((products, rows, LANES), jnp.float32),
                pltpu.VMEM((products, rows, LANES), jnp.float32),
                pltpu.VMEM((products, rows, plan.math.loader.value_width), jnp.float32),
                pltpu.SemaphoreType.DMA((2, plan.runs)),
                *new_scratch,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((count, products, place_rows, out_width), q.dtype),
            *([] if new is None else [jax.ShapeDtypeStruct(pages.shape, pages.dtype)]),
        ],
        input_output_aliases={} if new is None else {len(scalars) + len(operands) - 1: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=plan.vmem_bytes,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="paged_attention_decode",
    )(*scalars, *operands)
    return AttentionResult(results[0], pages if new is None else results[1])


def _kernel(
    plan: DecodePlan,
    settings: AttentionSettings,
    writes: bool,
    info_ref,
    seq_lens_ref,
    first_block_ref,
    block_ids_ref,
    q_ref,
    sinks_ref,
    *refs,
) -> None:
    math, layout = plan.math, settings.layout
    block_size = layout.block_size
    writer = None
    if writes:
        images_ref, _, out_ref, pages_ref, *scratch = refs
        *scratch, written, mixed_ref = scratch if NewRows(layout).are_mixed else (*scratch, None)
        writer = RowWriter(NewRows(layout), images_ref, mixed_ref, written)
    else:
        pages_ref, out_ref, *scratch = refs
    buffers, top_ref, total_ref, weighted_ref, semaphores = scratch
    base = pl.program_id(0) * plan.sequences
    stop_seq = jnp.minimum(info_ref[1], base + plan.sequences)

    def first_entry(seq):
        start = settings.first_visible(seq_lens_ref[seq] - 1)
        return start // block_size - first_block_ref[seq]

    def end_entry(seq):
        return (seq_lens_ref[seq] + block_size - 1) // block_size - first_block_ref[seq]

    def walk(seq, entry):
        """The next runs, and where those after them begin."""
        runs = []
        for _ in range(plan.runs):
            live = seq < stop_seq
            here = jnp.minimum(seq, stop_seq - 1)
            runs.append(Run(here, entry, live, entry == first_entry(here)))
            after = entry + plan.run_pages
            done = after >= end_entry(here)
            seq = jnp.where(done, seq + 1, seq)
            entry = jnp.where(done, first_entry(jnp.minimum(seq, stop_seq - 1)), after)
        return runs, seq, entry

    def pages_of(run):
        return jnp.where(run.live, jnp.minimum(end_entry(run.seq) - run.entry, plan.run_pages), 0)

    def fetch(runs, slot):
        for index, run in enumerate(runs):
            first = run.seq * plan.table_width + run.entry

            def copy(index_in_run, index=index, first=first):
                page = block_ids_ref[first + index_in_run] * settings.layer_slots + info_ref[0]
                return pltpu.make_async_copy(
                    pages_ref.at[page, pl.ds(0, buffers.shape[3])],
                    buffers.at[slot, index, index_in_run],
                    semaphores.at[slot, index],
                )

            start_copies(pages_of(run), copy)

    def wait(runs, slot):
        for index, run in enumerate(runs):

            @pl.when(run.live)
            def _(index=index, run=run):
                live = pl.ds(0, pages_of(run))  # of any pages: a wait counts bytes
                pltpu.make_async_copy(
                    pages_ref.at[live, pl.ds(0, buffers.shape[3])],
                    buffers.at[slot, index, live],
                    semaphores.at[slot, index],
                ).wait()

    def write(runs, slot, writer):
        """Puts the new tokens of sequences that end here into their pages, and starts their way back."""
        for index, run in enumerate(runs):
            last = end_entry(run.seq) - 1

            @pl.when(run.live & (last < run.entry + plan.run_pages))
            def _(index=index, run=run, last=last):
                page = block_ids_ref[run.seq * plan.table_width + last] * settings.layer_slots + info_ref[0]
                writer.start(
                    run.seq - base,
                    buffers.at[slot, index, last - run.entry],
                    pages_ref.at[page],
                    (seq_lens_ref[run.seq] - 1) % block_size,
                )

    def span(run):
        """Position of the run's first slot, and the live positions of its sequence."""
        position = (run.entry + first_block_ref[run.seq]) * block_size
        length = seq_lens_ref[run.seq]
        return position, settings.first_visible(length - 1), length

    def clear(runs, slot):
        """Zeroes the slots that hold nothing; inner runs have none."""
        for index, run in enumerate(runs):
            position, start, stop = span(run)
            buffer = buffers.at[slot, index]

            @pl.when(run.live & ((position < start) | (position + plan.run_pages * block_size > stop)))
            def _(run=run, buffer=buffer, position=position, start=start, stop=stop):
                clear_run(buffer, layout, pages_of(run), start - position, stop - position)

    def compute(runs, slot):
        products = range(math.products)
        state = [Softmax(top_ref[g], total_ref[g], weighted_ref[g]) for g in products]
        scored = []
        for index, run in enumerate(runs):
            position, start, stop = span(run)
            query, buffer = q_ref[run.seq - base], buffers.at[slot, index]
            scales = math.loader.scales(buffer)
            scored.append([math.scores(g, query[g], buffer, scales, position, start, stop) for g in products])
        for index, run in enumerate(runs):
            for g in products:
                mine = math.softmax(scored[index][g])
                fresh = Softmax(
                    sinks_ref[g],
                    jnp.full_like(state[g].total, 0.0 if settings.sinks is None else 1.0),
                    jnp.zeros_like(state[g].weighted),
                )
                before = fresh.or_else(state[g], run.first)
                state[g] = before.merge(mine).or_else(state[g], run.live)
                out_ref[run.seq - base, g] = math.result(state[g]).astype(out_ref.dtype)
        for g in products:
            top_ref[g], total_ref[g], weighted_ref[g] = state[g]

    @pl.when(base < stop_seq)
    def _():
        entry = first_entry(base)
        fetch(walk(base, entry)[0], 0)

        def step(carry):
            seq, entry, slot = carry
            runs, next_seq, next_entry = walk(seq, entry)
            fetch(walk(next_seq, next_entry)[0], 1 - slot)
            wait(runs, slot)
            if writer is not None:
                write(runs, slot, writer)
            clear(runs, slot)
            compute(runs, slot)
            return next_seq, next_entry, 1 - slot

        lax.while_loop(lambda carry: carry[0] < stop_seq, step, (base, entry, jnp.int32(0)))
        if writer is not None:
            writer.wait(stop_seq - base)
