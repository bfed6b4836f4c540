"""Paged attention on a TPU: one kernel, called once for decodes and once for prefill tiles.

The grid walks the tiles. A tile's pages come in chunks by one DMA a page, live pages only, into two buffers; the next
chunk, of this tile or the next one, is on its way while the current one is computed. Words become K and V in
registers, one KV head after another, with a running softmax in VMEM.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.layout import LANES
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.chunk_math import HIDDEN, ChunkMath
from pallas_kernels.tpu.tiles import TiledQueries, decode_tiles, merge_tiles, prefill_tiles

CHUNK_BYTES = 2 << 20  # of one of the two page buffers
DECODE_CHUNK = 1024  # tokens
PREFILL_CHUNK = 512
PREFILL_ROWS = 256  # query rows (tokens x group) of a prefill tile, about


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Static sizes of one call: `blocks` of a chunk, `width` of the table, `group` query heads to a KV head."""

    math: ChunkMath
    blocks: int
    width: int
    layer_slots: int
    sliding_window: int | None


def paged_attention_tpu(
    q: jax.Array,
    pages: jax.Array,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
    *,
    interpret: Any = False,
) -> jax.Array:
    """Same contract as `paged_attention_reference`. `interpret` is `pallas_call`'s."""
    heads = settings.layout.num_kv_heads
    group = q.shape[1] // heads
    in_bf16 = q.dtype == jnp.bfloat16 and settings.layout.dtype == "bfloat16"
    products = jnp.bfloat16 if in_bf16 else jnp.float32
    row_multiple = 16 if in_bf16 else 8
    size = max(1, min(PREFILL_ROWS // group, q.shape[0]))
    attend = partial(
        _attend_tiles, pages=pages, table=table, settings=settings, group=group, interpret=interpret
    )
    scaled = q.astype(products)
    decoded = attend(decode_tiles(scaled, batch, heads, row_multiple), DECODE_CHUNK)
    prefilled = attend(prefill_tiles(scaled, batch, heads, size, row_multiple), PREFILL_CHUNK)
    return merge_tiles(decoded, prefilled, batch, size, q.shape).astype(q.dtype)


def _attend_tiles(
    tiles: TiledQueries,
    chunk_tokens: int,
    *,
    pages: jax.Array,
    table: GroupTable,
    settings: AttentionSettings,
    group: int,
    interpret: Any,
) -> jax.Array:
    """Float32 `[N, Hkv, rows, D]`; rows of tiles that are not live are not written."""
    layout = settings.layout
    count, heads, rows, head_size = tiles.q.shape
    used_rows = layout.used_words // LANES
    blocks = min(
        chunk_tokens // layout.block_size, CHUNK_BYTES // (used_rows * LANES * 4), table.block_ids.shape[1]
    )
    plan = _Plan(
        math=ChunkMath(
            layout=layout,
            group=group,
            scale=settings.scale,
            sliding_window=settings.sliding_window,
            softcap=settings.softcap,
        ),
        blocks=max(blocks, 1),
        width=table.block_ids.shape[1],
        layer_slots=settings.layer_slots,
        sliding_window=settings.sliding_window,
    )
    last_live = jnp.maximum((tiles.schedule.count > 0).sum() - 1, 0)
    scalars = (
        jnp.stack([jnp.asarray(settings.layer_slot, jnp.int32), last_live.astype(jnp.int32)]),
        *tiles.schedule,
        table.first_block,
        table.block_ids.reshape(-1),
    )
    # Dead tiles all ask for the last live tile's block, so nothing is copied for them.
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
        out_shape=jax.ShapeDtypeStruct(tiles.q.shape, jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, tiles.q, pages)


def _kernel(
    plan: _Plan,
    info_ref,
    seq_ref,
    position_ref,
    count_ref,
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
    """One tile. `slot_ref` says which buffer its first chunk is in; tile 0 fetches its own, later ones find theirs."""
    tile, tiles = pl.program_id(0), pl.num_programs(0)
    block_size = plan.math.layout.block_size

    def start_of(t):
        """First position that tile t's queries see."""
        if plan.sliding_window is None:
            return 0
        return jnp.maximum(position_ref[t] - plan.sliding_window + 1, 0)

    def entries(t):
        """First and one past the last table entry of tile t."""
        first = first_block_ref[seq_ref[t]]
        stop = position_ref[t] + count_ref[t]
        return start_of(t) // block_size - first, (stop + block_size - 1) // block_size - first

    def chunk_range(t, chunk):
        begin, end = entries(t)
        begin = begin + chunk * plan.blocks
        return begin, jnp.clip(end - begin, 0, plan.blocks)

    def copy(t, begin, index, slot):
        """The DMA of one page of a chunk."""
        block = block_ids_ref[seq_ref[t] * plan.width + begin + index]
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

    @pl.when(count_ref[tile] > 0)
    def _():
        @pl.when(tile == 0)
        def _():
            slot_ref[0] = 0
            fetch(tile, 0, 0)

        begin, end = entries(tile)
        chunks = (end - begin + plan.blocks - 1) // plan.blocks
        following = jnp.minimum(tile + 1, tiles - 1)
        more = (tile + 1 < tiles) & (count_ref[following] > 0)
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
                stop=position_ref[tile] + count_ref[tile],
            )
            return 1 - slot

        slot_ref[0] = lax.fori_loop(0, chunks, compute, first_slot)
        total = total_ref[:, :, :1]
        out_ref[0] = weighted_ref[...] / jnp.where(total > 0, total, 1.0)
