"""Paged attention on a GPU: queries cut into tiles, a kernel called for decodes, one for prefill chunks."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.gpu.device import compute_capability
from pallas_kernels.gpu.live_pages import TileScalars
from pallas_kernels.gpu.plan import plan_decode, plan_prefill
from pallas_kernels.gpu.softmax import LOG2_E
from pallas_kernels.gpu.terms import count_terms, terms_of
from pallas_kernels.gpu.tile_kernel import Parts, TilePlan, attend_tiles
from pallas_kernels.gpu.tiles import (
    Tiles,
    decode_tiles,
    prefill_tiles,
    tile_queries,
    untile_decodes,
    untile_prefills,
)
from pallas_kernels.gpu.wgmma_kernel import WgmmaPlan, attend_wide_tiles
from pallas_kernels.settings import AttentionSettings


def paged_attention_gpu(
    q: jax.Array,
    pages: jax.Array,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
    *,
    interpret: Any = None,
) -> jax.Array:
    """Same contract as `paged_attention_reference`. `interpret` is `plgpu.kernel`'s.

    Raises ValueError where no tile of queries fits.
    """
    heads = settings.layout.num_kv_heads
    group = q.shape[1] // heads
    static = replace(settings, layer_slot=0, sinks=None)  # a kernel's settings hold no arrays

    def attend(tiles: Tiles, rows: int, call: TilePlan | WgmmaPlan) -> jax.Array:
        tiled = tile_queries(q, tiles, heads * call.head_tiles, rows)
        layer_slot = jnp.asarray(settings.layer_slot, jnp.int32).reshape(1)
        schedule = (tiles.seq, tiles.position, tiles.num_queries)
        scalars = TileScalars(layer_slot, *schedule, table.first_block, table.block_ids)
        if isinstance(call, WgmmaPlan):
            parts = attend_wide_tiles(scalars, tiled, pages, call, interpret=interpret)
        else:
            terms = jnp.stack(terms_of(tiled, count_terms(q.dtype)), axis=2)
            parts = attend_tiles(scalars, terms, pages, call, interpret=interpret)
        return merge_parts(parts, settings, call.group)

    decode = plan_decode(static, group, batch.seq_lens.shape[0], table, q.dtype)
    out = untile_decodes(attend(decode_tiles(batch), decode.rows, decode.call), batch, decode.call.group)
    if not batch.decode_only:
        prefill = plan_prefill(static, group, q.dtype, compute_capability())
        tiled = attend(prefill_tiles(batch, prefill.size), prefill.rows, prefill.call)
        out = out + untile_prefills(tiled, batch, prefill.size, prefill.call.group)
    return out.astype(q.dtype)


def merge_parts(parts: Parts, settings: AttentionSettings, group: int) -> jax.Array:
    """The mean over all splits, float32 `[N, H, rows, Dv]`; sinks take their share of the weight."""
    mean = parts.mean.astype(jnp.float32).sum(axis=3)
    mass = parts.mass
    if settings.sinks is None and mass.shape[2] == 1:
        return mean[:, :, 0]
    heads, rows = mass.shape[1], mass.shape[3]
    top = mass.max(axis=2, keepdims=True)
    sinks = settings.sinks_by_row(heads, -(-rows // group))
    if sinks is not None:
        sinks = sinks[:, None, :rows] * LOG2_E
        top = jnp.maximum(top, sinks)
    weight = jnp.exp2(mass - top)
    total = weight.sum(axis=2, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp2(sinks - top)
    return ((weight / total)[..., None] * mean).sum(axis=2)
