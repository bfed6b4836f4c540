"""Cutting a step's queries into tiles for the kernels, and the tiles' results back to token order.

Row `r` of a tile is query head `r % group` (of the tile's) of the tile's token `r // group`; rows past the
last token hold some other query, and what they give is not used. Where one tile has no room for all query
heads of a KV head, several tiles share it: H is KV heads times those.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch


class Tiles(NamedTuple):
    """Int32 `[N]`: sequence, position of the first query, queries (or 0), token of the first query."""

    seq: jax.Array
    position: jax.Array
    num_queries: jax.Array
    token: jax.Array


def decode_tiles(batch: RaggedBatch) -> Tiles:
    """One tile of one query for each sequence; only the first `num_decodes` have it."""
    seq = jnp.arange(batch.seq_lens.shape[0], dtype=jnp.int32)
    live = seq < batch.num_decodes
    return Tiles(seq, jnp.where(live, batch.seq_lens - 1, 0), live.astype(jnp.int32), seq)


def prefill_tiles(batch: RaggedBatch, size: int) -> Tiles:
    """Tiles of up to `size` queries of one sequence, for the sequences after the decodes."""
    tokens, rows = batch.positions.shape[0], batch.seq_lens.shape[0]
    last = jnp.cumsum(_tiles_of_sequences(batch, size))
    tile = jnp.arange(-(-tokens // size) + rows, dtype=jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(last, tile, side="right"), rows - 1).astype(jnp.int32)
    first = jnp.where(seq > 0, last[seq - 1], 0)
    token = batch.query_starts[seq] + (tile - first) * size
    end = batch.query_starts[seq + 1]
    count = jnp.where(tile < last[-1], jnp.clip(end - token, 0, size), 0)
    position = jnp.where(count > 0, batch.seq_lens[seq] - end + token, 0)
    return Tiles(seq, position, count, token)


def tile_queries(q: jax.Array, tiles: Tiles, heads: int, rows: int) -> jax.Array:
    """`q [T, Hq, D]` as tiles `[N, H, rows, D]`; `heads` is H."""
    tokens, q_heads, head_size = q.shape
    group = q_heads // heads
    per_tile = -(-rows // group)
    token = jnp.clip(tiles.token[:, None] + jnp.arange(per_tile), 0, tokens - 1)
    tiled = q[token].reshape(-1, per_tile, heads, group, head_size).transpose(0, 2, 1, 3, 4)
    return tiled.reshape(-1, heads, per_tile * group, head_size)[:, :, :rows]


def untile_decodes(tiled: jax.Array, batch: RaggedBatch, group: int) -> jax.Array:
    """Results `[S, H, rows, D]` of decode tiles in token order `[T, H * group, D]`, else 0."""
    seqs, heads, _, head_size = tiled.shape
    seq = jnp.minimum(batch.seq_ids, seqs - 1)
    out = tiled[seq, :, :group].reshape(seq.shape[0], heads * group, head_size)
    return jnp.where((batch.seq_ids < batch.num_decodes)[:, None, None], out, 0)


def untile_prefills(tiled: jax.Array, batch: RaggedBatch, size: int, group: int) -> jax.Array:
    """Results `[N, H, rows, D]` of tiles of `size` queries in token order `[T, H * group, D]`, else 0."""
    count, heads, _, head_size = tiled.shape
    tokens, seqs = batch.positions.shape[0], batch.seq_lens.shape[0]
    seq = jnp.minimum(batch.seq_ids, seqs - 1)
    of_sequences = _tiles_of_sequences(batch, size)
    offset = jnp.arange(tokens) - batch.query_starts[seq]
    tile = (jnp.cumsum(of_sequences) - of_sequences)[seq] + offset // size
    by_query = tiled[:, :, : size * group].reshape(count, heads, size, group, head_size)
    out = by_query[jnp.clip(tile, 0, count - 1), :, offset % size].reshape(tokens, heads * group, head_size)
    in_prefill = (batch.seq_ids >= batch.num_decodes) & (batch.seq_ids < batch.num_seqs)
    return jnp.where(in_prefill[:, None, None], out, 0)


def _tiles_of_sequences(batch: RaggedBatch, size: int) -> jax.Array:
    """Prefill tiles that each sequence has, int32 `[S]`: 0 for decodes and padding rows."""
    index = jnp.arange(batch.seq_lens.shape[0])
    lengths = batch.query_starts[1:] - batch.query_starts[:-1]
    in_prefill = (index >= batch.num_decodes) & (index < batch.num_seqs)
    return jnp.where(in_prefill, -(-lengths // size), 0).astype(jnp.int32)
