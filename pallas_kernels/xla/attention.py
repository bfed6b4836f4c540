"""Paged attention in plain XLA: decodes in runs of blocks, prefill chunks in tiles of queries.

No shape depends on a length, so nothing compiles again when lengths change.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.xla.decode import attend_decodes
from pallas_kernels.xla.spans import Span, Tile, attend_span, blocks_of

QUERY_TILE = 128
PREFILL_CHUNK = 256


def paged_attention_xla(
    q: jax.Array, pages: jax.Array, batch: RaggedBatch, table: GroupTable, settings: AttentionSettings
) -> jax.Array:
    """Same contract as `paged_attention_reference`."""
    out = jnp.zeros((*q.shape[:2], settings.layout.value_size), q.dtype)
    out = attend_decodes(out, q, pages, batch, table, settings)
    if batch.decode_only:
        return out
    return attend_prefills(out, q, pages, batch, table, settings)


def attend_prefills(
    out: jax.Array,
    q: jax.Array,
    pages: jax.Array,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
) -> jax.Array:
    tokens, q_heads, head_size = q.shape
    heads = settings.layout.num_kv_heads
    size = min(QUERY_TILE, tokens)
    chunks = [blocks_of(PREFILL_CHUNK, table, settings)]

    def attend_sequence(seq: jax.Array, out: jax.Array) -> jax.Array:
        begin, end = batch.query_starts[seq], batch.query_starts[seq + 1]
        to_position = batch.seq_lens[seq] - end  # position of a token = its index + this

        def attend_tile(index: jax.Array, out: jax.Array) -> jax.Array:
            first = begin + index * size
            last = jnp.minimum(first + size, end) - 1
            base = jnp.minimum(first, tokens - size)  # a slice past the end would be moved: move it knowingly
            rows = base + jnp.arange(size)
            mine = (rows >= first) & (rows <= last)
            until = rows + to_position
            start = jnp.int32(0)
            after = jnp.full_like(until, -1)
            if settings.span is not None:
                start = settings.first_visible(first + to_position)
                after = settings.first_visible(until) - 1
            window = lax.dynamic_slice_in_dim(q, base, size).astype(jnp.float32) * settings.scale
            window = window.reshape(size, heads, -1, head_size).transpose(1, 0, 2, 3)
            group = q_heads // heads
            tile = Tile(
                window.reshape(heads, size * group, head_size),
                jnp.repeat(after, group),
                jnp.repeat(until, group),
                settings.sinks_by_row(heads, size),
            )
            span = Span(seq, start, last + to_position + 1)
            mean = attend_span(tile, span, pages, table, settings, chunks)
            mean = (
                mean.reshape(heads, size, group, out.shape[2])
                .transpose(1, 0, 2, 3)
                .reshape(size, q_heads, out.shape[2])
            )
            old = lax.dynamic_slice_in_dim(out, base, size)
            new = jnp.where(mine[:, None, None], mean.astype(out.dtype), old)
            return lax.dynamic_update_slice_in_dim(out, new, base, 0)

        return lax.fori_loop(0, (end - begin + size - 1) // size, attend_tile, out)

    return lax.fori_loop(batch.num_decodes, batch.num_seqs, attend_sequence, out)
