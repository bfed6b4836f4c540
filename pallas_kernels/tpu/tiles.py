"""Cutting a step's queries into tiles, and putting the tiles' results back in token order."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch


class TileSchedule(NamedTuple):
    """What each tile computes, int32 `[N]`; live tiles come first.

    `seq` is the sequence, `position` that of the tile's first query, `num_queries` how many there are (or 0).
    """

    seq: jax.Array
    position: jax.Array
    num_queries: jax.Array


class TiledQueries(NamedTuple):
    """`q [N, Hkv, rows, D]` with row `token * group + member` of each KV head, rows padded; its schedule."""

    q: jax.Array
    schedule: TileSchedule


def prefill_tiles(q: jax.Array, batch: RaggedBatch, heads: int, size: int, rows_of_tile: int) -> TiledQueries:
    """Tiles of up to `size` queries of one sequence, for the sequences after the decodes; rows are padded."""
    tokens, q_heads, head_size = q.shape
    starts, rows = batch.query_starts, batch.seq_lens.shape[0]
    last_tile = jnp.cumsum(_tiles_of_sequences(batch, size))
    tile = jnp.arange(-(-tokens // size) + rows, dtype=jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(last_tile, tile, side="right"), rows - 1).astype(jnp.int32)
    before = jnp.where(seq > 0, last_tile[seq - 1], 0)
    first = starts[seq] + (tile - before) * size
    count = jnp.where(tile < last_tile[-1], jnp.minimum(starts[seq + 1] - first, size), 0)
    position = jnp.where(count > 0, batch.seq_lens[seq] - starts[seq + 1] + first, 0)
    members = jnp.clip(first[:, None] + jnp.arange(size), 0, tokens - 1)
    group = q_heads // heads
    tiled = q[members].reshape(tile.shape[0], size, heads, group, head_size).transpose(0, 2, 1, 3, 4)
    tiled = tiled.reshape(tile.shape[0], heads, size * group, head_size)
    padding = rows_of_tile - size * group
    return TiledQueries(
        jnp.pad(tiled, ((0, 0), (0, 0), (0, padding), (0, 0))), TileSchedule(seq, position, count)
    )


def untile(tiled: jax.Array, batch: RaggedBatch, size: int, group: int) -> jax.Array:
    """Results `[N, Hkv, rows, D]` of prefill tiles in token order, `[T, Hkv * group, D]`, else 0."""
    _, heads, _, head_size = tiled.shape
    tokens, rows = batch.positions.shape[0], batch.seq_lens.shape[0]
    seq = jnp.minimum(batch.seq_ids, rows - 1)
    per_sequence = _tiles_of_sequences(batch, size)
    offset = jnp.arange(tokens) - batch.query_starts[seq]
    tile = (jnp.cumsum(per_sequence) - per_sequence)[seq] + offset // size
    by_token = tiled[:, :, : size * group].reshape(-1, heads, size, group, head_size)
    many = by_token[jnp.clip(tile, 0, by_token.shape[0] - 1), :, offset % size]
    in_prefill = (batch.seq_ids >= batch.num_decodes) & (batch.seq_ids < batch.num_seqs)
    return jnp.where(in_prefill[:, None, None], many.reshape(tokens, heads * group, head_size), 0)


def _tiles_of_sequences(batch: RaggedBatch, size: int) -> jax.Array:
    """Prefill tiles that each sequence has, int32 `[S]`: 0 for decodes and padding rows."""
    index = jnp.arange(batch.seq_lens.shape[0])
    lengths = batch.query_starts[1:] - batch.query_starts[:-1]
    in_prefill = (index >= batch.num_decodes) & (index < batch.num_seqs)
    return jnp.where(in_prefill, -(-lengths // size), 0).astype(jnp.int32)
