"""The prefill kernel and its call: tiles of queries over chunks of pages.

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
from pallas_kernels.tpu.operands import start_copies
from pallas_kernels.tpu.prefill_math import PrefillMath
from pallas_kernels.tpu.running import HIDDEN


@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """Static sizes of one call: queries of a tile, blocks of a chunk, entries in a row of the table."""

    math: PrefillMath
    tile: int
    blocks: int
    table_width: int
    vmem_bytes: int


class PrefillScalars(NamedTuple):
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
    scalars: PrefillScalars,
    q: jax.Array,
    sinks: jax.Array | None,
    pages: jax.Array,
    plan: PrefillPlan,
    *,
    interpret: Any = False,
) -> jax.Array:
    """Attention of tiles `q [N, Hkv, place_rows, key_width]`: `[N, Hkv, place_rows, result_width]`, if live.

    `sinks [Hkv, rows, 128]` are the rows' tops before anything is seen, or None.
    """
    count, heads, rows, width = q.shape
    maths = plan.math
    used_rows, out_width = maths.loader.layout.used_rows, maths.loader.result_width
    tops = jnp.full((heads, maths.rows, LANES), HIDDEN, jnp.float32) if sinks is None else sinks

    # Tiles that are not live all ask for the last live tile's block, so nothing is copied for them.
    def of_tile(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, rows, width), lambda i, info, *_: (jnp.minimum(i, info[1]), 0, 0, 0))

    return pl.pallas_call(
        partial(_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count,),
            in_specs=[
                of_tile(width),
                pl.BlockSpec(tops.shape, lambda i, *_: (0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=of_tile(out_width),
            scratch_shapes=[
                pltpu.VMEM((2, plan.blocks, used_rows, LANES), jnp.uint32),
                maths.scratch_shapes,
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((count, heads, rows, out_width), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=plan.vmem_bytes, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="paged_attention_prefill",
    )(*scalars, q, tops, pages)


def _kernel(
    plan: PrefillPlan,
    info_ref,
    seq_ref,
    position_ref,
    num_queries_ref,
    first_block_ref,
    block_ids_ref,
    q_ref,
    tops_ref,
    pages_ref,
    out_ref,
    buffers,
    scratch,
    slot_ref,
    semaphores,
) -> None:
    """One tile. `slot_ref` names the buffer of its first chunk, which the tile before has fetched."""
    tile, tiles = pl.program_id(0), pl.num_programs(0)
    settings = plan.math.settings
    block_size = settings.layout.block_size

    def entries(t):
        """First and one past the last table entry of tile t."""
        first = first_block_ref[seq_ref[t]]
        stop = position_ref[t] + num_queries_ref[t]
        start = settings.first_visible(position_ref[t])
        return start // block_size - first, (stop + block_size - 1) // block_size - first

    def chunk_range(t, chunk):
        begin, end = entries(t)
        begin = begin + chunk * plan.blocks
        return begin, jnp.clip(end - begin, 0, plan.blocks)

    def copy(t, begin, index, slot):
        """The DMA of one page of a chunk."""
        block = block_ids_ref[seq_ref[t] * plan.table_width + begin + index]
        page = block * settings.layer_slots + info_ref[0]
        return pltpu.make_async_copy(
            pages_ref.at[page, pl.ds(0, buffers.shape[2])], buffers.at[slot, index], semaphores.at[slot]
        )

    def fetch(t, chunk, slot):
        begin, live = chunk_range(t, chunk)
        start_copies(live, lambda index: copy(t, begin, index, slot))

    def wait(live, slot):
        some = pl.ds(0, live)  # of any pages: a wait counts bytes
        pltpu.make_async_copy(
            pages_ref.at[some, pl.ds(0, buffers.shape[2])], buffers.at[slot, some], semaphores.at[slot]
        ).wait()

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
        plan.math.start_tile(q_ref.at[0], tops_ref, scratch)

        def compute(chunk, slot):
            @pl.when(chunk + 1 < chunks)
            def _():
                fetch(tile, chunk + 1, 1 - slot)

            @pl.when((chunk + 1 == chunks) & more)
            def _():
                fetch(following, 0, 1 - slot)

            entry, live = chunk_range(tile, chunk)
            wait(live, slot)
            plan.math.add_chunk(
                q_ref.at[0],
                buffers.at[slot],
                scratch,
                live=live,
                position=(entry + first_block_ref[seq_ref[tile]]) * block_size,
                query=position_ref[tile],
                num_queries=num_queries_ref[tile],
            )
            return 1 - slot

        slot_ref[0] = lax.fori_loop(0, chunks, compute, first_slot)
        plan.math.put_results(out_ref.at[0], scratch)
