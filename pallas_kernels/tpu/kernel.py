"""The attention kernel and its call: tiles of queries over chunks of pages.

The grid walks the tiles. A tile's pages come in chunks, by one DMA a page, live pages only, into two buffers:
the next chunk, of this tile or of the next one, is on its way while the current one is computed.
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
from pallas_kernels.tpu.chunk_math import HIDDEN, ChunkMath


@dataclass(frozen=True, kw_only=True)
class KernelPlan:
    """Static sizes of one call: blocks of a chunk, entries in a row of the table, layer slots of the pool."""

    math: ChunkMath
    blocks: int
    table_width: int
    layer_slots: int


class KernelScalars(NamedTuple):
    """What steers the kernel, int32 in SMEM.

    info `[2]` is the layer slot and the index of the last live tile; seq, position, num_queries `[N]` are the
    tiles' schedule; first_block `[S]`; block_ids `[S * table_width]`.
    """

    info: jax.Array
    seq: jax.Array
    position: jax.Array
    num_queries: jax.Array
    first_block: jax.Array
    block_ids: jax.Array


def attend_tiles(
    scalars: KernelScalars, q: jax.Array, pages: jax.Array, plan: KernelPlan, *, interpret: Any = False
) -> jax.Array:
    """Attention of tiles `q [N, Hkv, rows, D]`, float32 of that shape; only live tiles are written."""
    count, heads, rows, head_size = q.shape
    used_rows = plan.math.layout.used_words // LANES
    # Tiles that are not live all ask for the last live tile's block, so nothing is copied for them.
    block = pl.BlockSpec((1, heads, rows, head_size), lambda i, info, *_: (jnp.minimum(i, info[1]), 0, 0, 0))
    return pl.pallas_call(
        partial(_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count,),
            in_specs=[block, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=block,
            scratch_shapes=[
                pltpu.VMEM((2, plan.blocks, used_rows, LANES), jnp.uint32),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, head_size), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, q, pages)


def _kernel(
    plan: KernelPlan,
    info_ref,
    seq_ref,
    position_ref,
    num_queries_ref,
    first_block_ref,
    block_ids_ref,
    q_ref,
    pages_ref,
    out_ref,
    buffers,
    top_ref,
    total_ref,
    weighted_ref,
    slot_ref,
    semaphores,
) -> None:
    """One tile. `slot_ref` names the buffer of its first chunk, which the tile before has fetched."""
    tile, tiles = pl.program_id(0), pl.num_programs(0)
    block_size = plan.math.layout.block_size

    def start_of(t):
        """First position that tile t's queries see."""
        if plan.math.sliding_window is None:
            return 0
        return jnp.maximum(position_ref[t] - plan.math.sliding_window + 1, 0)

    def entries(t):
        """First and one past the last table entry of tile t."""
        first = first_block_ref[seq_ref[t]]
        stop = position_ref[t] + num_queries_ref[t]
        return start_of(t) // block_size - first, (stop + block_size - 1) // block_size - first

    def chunk_range(t, chunk):
        begin, end = entries(t)
        begin = begin + chunk * plan.blocks
        return begin, jnp.clip(end - begin, 0, plan.blocks)

    def copy(t, begin, index, slot):
        """The DMA of one page of a chunk."""
        block = block_ids_ref[seq_ref[t] * plan.table_width + begin + index]
        page = block * plan.layer_slots + info_ref[0]
        return pltpu.make_async_copy(
            pages_ref.at[page, pl.ds(0, buffers.shape[2])], buffers.at[slot, index], semaphores.at[slot]
        )

    def fetch(t, chunk, slot):
        begin, live = chunk_range(t, chunk)
        lax.fori_loop(0, live, lambda index, _: copy(t, begin, index, slot).start(), None)

    def wait(t, chunk, slot):
        begin, live = chunk_range(t, chunk)
        lax.fori_loop(0, live, lambda index, _: copy(t, begin, index, slot).wait(), None)

    @pl.when(num_queries_ref[tile] > 0)
    def _():
        @pl.when(tile == 0)
        def _():
            slot_ref[0] = 0
            fetch(tile, 0, 0)

        begin, end = entries(tile)
        chunks = (end - begin + plan.blocks - 1) // plan.blocks
        following = jnp.minimum(tile + 1, tiles - 1)
        more = (tile + 1 < tiles) & (num_queries_ref[following] > 0)
        first_slot = slot_ref[0]
        top_ref[...] = jnp.full_like(top_ref, HIDDEN)
        total_ref[...] = jnp.zeros_like(total_ref)
        weighted_ref[...] = jnp.zeros_like(weighted_ref)

        def compute(chunk, slot):
            @pl.when(chunk + 1 < chunks)
            def _():
                fetch(tile, chunk + 1, 1 - slot)

            @pl.when((chunk + 1 == chunks) & more)
            def _():
                fetch(following, 0, 1 - slot)

            wait(tile, chunk, slot)
            entry = begin + chunk * plan.blocks
            first_position = (entry + first_block_ref[seq_ref[tile]]) * block_size
            plan.math.add_chunk(
                q_ref.at[0],
                buffers.at[slot],
                (top_ref, total_ref, weighted_ref),
                first_position=first_position,
                query_position=position_ref[tile],
                start=start_of(tile),
                stop=position_ref[tile] + num_queries_ref[tile],
            )
            return 1 - slot

        slot_ref[0] = lax.fori_loop(0, chunks, compute, first_slot)
        total = total_ref[:, :, :1]
        out_ref[0] = weighted_ref[...] / jnp.where(total > 0, total, 1.0)
