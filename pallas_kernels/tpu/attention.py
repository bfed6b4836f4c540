"""Paged attention on a TPU: queries cut into tiles, the kernel called for decodes and for prefill."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.layout import LANES
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.chunk_math import ChunkMath
from pallas_kernels.tpu.kernel import KernelPlan, KernelScalars, attend_tiles
from pallas_kernels.tpu.tiles import (
    TiledQueries,
    TileSchedule,
    decode_tiles,
    merge_tiles,
    prefill_tiles,
    untile_decodes,
)

CHUNK_BYTES = 2 << 20  # of one of the two page buffers
DECODE_CHUNK = 1024  # tokens
PREFILL_CHUNK = 512
PREFILL_ROWS = 256  # query rows (tokens x group) of a prefill tile, about


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
    layout = settings.layout
    heads = layout.num_kv_heads
    group = q.shape[1] // heads
    in_bf16 = q.dtype == jnp.bfloat16 and layout.dtype == "bfloat16"
    row_multiple = 16 if in_bf16 else 8
    size = max(1, min(PREFILL_ROWS // group, q.shape[0]))
    queries = q.astype(jnp.bfloat16 if in_bf16 else jnp.float32)

    def attend(tiles: TiledQueries, chunk_tokens: int) -> jax.Array:
        plan = plan_call(settings, group, table.block_ids.shape[1], chunk_tokens)
        scalars = scalars_of(tiles.schedule, table, settings)
        return attend_tiles(scalars, tiles.q, pages, plan, interpret=interpret)

    decoded = attend(decode_tiles(queries, batch, heads, row_multiple), DECODE_CHUNK)
    if batch.decode_only:
        return untile_decodes(decoded, batch, group).astype(q.dtype)
    prefilled = attend(prefill_tiles(queries, batch, heads, size, row_multiple), PREFILL_CHUNK)
    return merge_tiles(decoded, prefilled, batch, size, group).astype(q.dtype)


def plan_call(settings: AttentionSettings, group: int, table_width: int, chunk_tokens: int) -> KernelPlan:
    """Static sizes for tables of `table_width` entries and chunks of at most `chunk_tokens`."""
    layout = settings.layout
    page_bytes = layout.used_words // LANES * LANES * 4
    return KernelPlan(
        math=ChunkMath(
            layout=layout,
            group=group,
            scale=settings.scale,
            sliding_window=settings.sliding_window,
            softcap=settings.softcap,
        ),
        blocks=max(min(chunk_tokens // layout.block_size, CHUNK_BYTES // page_bytes, table_width), 1),
        table_width=table_width,
        layer_slots=settings.layer_slots,
    )


def scalars_of(schedule: TileSchedule, table: GroupTable, settings: AttentionSettings) -> KernelScalars:
    """The kernel's scalars for a schedule."""
    last_live = jnp.maximum((schedule.num_queries > 0).sum() - 1, 0)
    info = jnp.stack([jnp.asarray(settings.layer_slot, jnp.int32), last_live.astype(jnp.int32)])
    return KernelScalars(info, *schedule, table.first_block, table.block_ids.reshape(-1))
