"""Paged attention on a TPU: queries cut into tiles, the kernel called for decodes and for prefill."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.outputs import AttentionResult
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.decode import DecodeScalars, attend_decodes
from pallas_kernels.tpu.decode_plan import plan_decode
from pallas_kernels.tpu.new_rows import NewRows
from pallas_kernels.tpu.parts import Part, parts_of
from pallas_kernels.tpu.prefill import PrefillScalars, attend_tiles
from pallas_kernels.tpu.prefill_plan import plan_prefill
from pallas_kernels.tpu.tiles import prefill_tiles, untile
from pallas_kernels.tpu.write import write_kv_tpu


class NewTokens(NamedTuple):
    """K and V of the step's tokens that are not in the pool yet; without V: latents."""

    k: jax.Array
    v: jax.Array | None


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
    return _attend(q, None, pages, batch, table, settings, interpret=interpret).out


def write_and_attend_tpu(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    pages: jax.Array,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
    *,
    interpret: Any = False,
) -> AttentionResult:
    """What `write_kv_tpu` and then `paged_attention_tpu` do; the decode kernel writes decodes' tokens itself.

    Chunks are written before: what other sequences of the step read may be in them.
    """
    return _attend(q, NewTokens(k, v), pages, batch, table, settings, interpret=interpret)


def _attend(
    q: jax.Array,
    new: NewTokens | None,
    pages: jax.Array,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
    *,
    interpret: Any,
) -> AttentionResult:
    in_bf16 = q.dtype == jnp.bfloat16 and settings.layout.dtype != "float32"
    queries = q.astype(jnp.bfloat16 if in_bf16 else jnp.float32)
    parts, rows = list(parts_of(batch, table)), batch.seq_lens.shape[0]
    images = None
    if new is not None:
        v = None if new.v is None else new.v[:rows]
        images = _with_rows(NewRows(settings.layout).images(new.k[:rows], v), rows)
        if not batch.decode_only:
            pages = write_kv_tpu(
                pages, *new, batch, table, settings, first_seq=batch.num_decodes, interpret=interpret
            )
    decodes, decoded = _with_rows(queries, rows), []
    for part in parts:
        result = _decode(decodes, images, pages, part, settings, interpret=interpret)
        decoded.append(result.out)
        pages = result.pages
    is_decode = jnp.arange(q.shape[0]) < batch.num_decodes
    out = jnp.where(is_decode[:, None, None], _with_rows(jnp.concatenate(decoded), q.shape[0]), 0)
    if not batch.decode_only:
        for part in parts:
            out = out + _prefill(queries, pages, part, settings, interpret=interpret)
    return AttentionResult(out.astype(q.dtype), pages)


def _decode(
    q: jax.Array,
    new: jax.Array | None,
    pages: jax.Array,
    part: Part,
    settings: AttentionSettings,
    *,
    interpret: Any,
) -> AttentionResult:
    """Results `[S, Hq, Dv]` of a part's sequences, which mean something for decodes; `q [S, Hq, D]`, images
    `new [S, rows, 128]` of the last tokens or None.
    """
    rows, width = part.table.block_ids.shape
    mine = slice(part.first, part.first + rows)
    plan = plan_decode(settings, q_heads=q.shape[1], dtype=q.dtype, rows=rows, table_width=width)
    whole = -(-rows // plan.sequences) * plan.sequences
    info = jnp.stack([jnp.asarray(settings.layer_slot, jnp.int32), part.batch.num_decodes - part.first])
    result = attend_decodes(
        DecodeScalars(
            info, part.batch.seq_lens[mine], part.table.first_block, part.table.block_ids.reshape(-1)
        ),
        plan.math.arrange(_with_rows(q[mine], whole)),
        None if settings.sinks is None else plan.math.arrange_sinks(settings.sinks),
        pages,
        plan,
        settings,
        new=None if new is None else _with_rows(new[mine], whole),
        interpret=interpret,
    )
    return AttentionResult(plan.math.restore(result.out)[:rows], result.pages)


def _prefill(
    q: jax.Array, pages: jax.Array, part: Part, settings: AttentionSettings, *, interpret: Any
) -> jax.Array:
    """Results `[T, Hq, Dv]` of a part's prefill chunks; 0 for the other tokens."""
    layout = settings.layout
    group = q.shape[1] // layout.num_kv_heads
    plan = plan_prefill(
        settings, group=group, tokens=q.shape[0], table_width=part.table.block_ids.shape[1], dtype=q.dtype
    )
    tiles = prefill_tiles(q, part.batch, layout.num_kv_heads, plan.tile, plan.math.place_rows)
    in_part = jnp.clip(tiles.schedule.seq - part.first, 0, part.table.first_block.shape[0] - 1)
    schedule = tiles.schedule._replace(seq=in_part)
    last_live = jnp.maximum((tiles.schedule.num_queries > 0).sum() - 1, 0)
    info = jnp.stack([jnp.asarray(settings.layer_slot, jnp.int32), last_live.astype(jnp.int32)])
    out = attend_tiles(
        PrefillScalars(info, *schedule, part.table.first_block, part.table.block_ids.reshape(-1)),
        plan.math.places.repeat(tiles.q),
        plan.math.tops_of_sinks(plan.tile),
        pages,
        plan,
        interpret=interpret,
    )
    return untile(out[..., : layout.value_size], part.batch, plan.tile, group)


def _with_rows(x: jax.Array, rows: int) -> jax.Array:
    """`x` with exactly `rows` rows: cut, or padded with zeros."""
    return jnp.pad(x[:rows], ((0, max(rows - x.shape[0], 0)), (0, 0), (0, 0)))
