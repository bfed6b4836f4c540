"""Paged attention on a GPU: queries cut into tiles, a kernel called for decodes and for prefill chunks."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.gpu.plan import plan_decode, plan_prefill
from pallas_kernels.gpu.terms import count_terms, terms_of
from pallas_kernels.gpu.tile_kernel import LOG2_E, MMA_ROWS, Parts, TilePlan, TileScalars, attend_tiles
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.tiles import (
    TiledQueries,
    decode_tiles,
    merge_tiles,
    prefill_tiles,
    untile_decodes,
)


def paged_attention_gpu(
    q: jax.Array,
    pages: jax.Array,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
    *,
    interpret: Any = None,
) -> jax.Array:
    """Same contract as `paged_attention_reference`. `interpret` is `plgpu.kernel`'s."""
    heads = settings.layout.num_kv_heads
    group = q.shape[1] // heads
    pool = pages.reshape(pages.shape[0], -1, settings.layout.head_size)

    def attend(tiles: TiledQueries, plan: TilePlan) -> jax.Array:
        scalars = TileScalars(
            jnp.asarray(settings.layer_slot, jnp.int32).reshape(1),
            *tiles.schedule,
            table.first_block,
            table.block_ids,
        )
        terms = jnp.stack(terms_of(tiles.q, count_terms(q.dtype)), axis=2)
        # The kernel's own settings hold no arrays.
        plan = replace(plan, settings=replace(settings, layer_slot=0, sinks=None))
        return merge_parts(attend_tiles(scalars, terms, pool, plan, interpret=interpret), settings, group)

    tiles = decode_tiles(q, batch, heads, MMA_ROWS)
    decoded = attend(tiles, plan_decode(settings, group, tiles.q.shape, table, q.dtype))
    if batch.decode_only:
        return untile_decodes(decoded, batch, group).astype(q.dtype)
    size, plan = plan_prefill(settings, group, q.dtype)
    prefilled = attend(prefill_tiles(q, batch, heads, size, MMA_ROWS), plan)
    return merge_tiles(decoded, prefilled, batch, size, group).astype(q.dtype)


def merge_parts(parts: Parts, settings: AttentionSettings, group: int) -> jax.Array:
    """The mean over all splits, float32 `[N, Hkv, rows, D]`; sinks take their share of the weight."""
    mean = parts.mean.astype(jnp.float32).sum(axis=3)
    mass = parts.mass
    if settings.sinks is None and mass.shape[2] == 1:
        return mean[:, :, 0]
    top = mass.max(axis=2, keepdims=True)
    sink = None
    if settings.sinks is not None:
        rows, heads = mass.shape[3], mass.shape[1]
        by_row = settings.sinks_by_row(heads, -(-rows // group))
        assert by_row is not None
        sink = by_row[:, None, :rows] * LOG2_E
        top = jnp.maximum(top, sink)
    weight = jnp.exp2(mass - top)
    total = weight.sum(axis=2)
    if sink is not None:
        total = total + jnp.exp2(sink - top)[:, :, 0]
    return (weight[..., None] * mean).sum(axis=2) / total[..., None]
