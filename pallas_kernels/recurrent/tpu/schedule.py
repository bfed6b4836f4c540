"""Cutting prefill sequences into chunks of one size, and putting the chunks' results back in token order."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.recurrent.state_table import StateTable


class Chunks(NamedTuple):
    """Chunks in order, live ones first, int32 `[N]` each.

    seq; first token; num_tokens (0 in a sequence without new tokens, and in chunks that are not live);
    opens, closes: 1 if it is its sequence's first, last; seq_len: tokens of the sequence up to its end.
    num_live `[1]`.
    """

    seq: jax.Array
    first: jax.Array
    num_tokens: jax.Array
    opens: jax.Array
    closes: jax.Array
    seq_len: jax.Array
    num_live: jax.Array


def cut(batch: RaggedBatch, table: StateTable, length: int) -> Chunks:
    """Chunks of up to `length` tokens of the sequences after the decodes. They end where a state is kept."""
    rows, kept = table.checkpoint_lens.shape
    tokens = batch.positions.shape[0]
    begin, end = batch.query_starts[:-1], batch.query_starts[1:]
    to_len = batch.seq_lens - end
    seq = jnp.arange(rows, dtype=jnp.int32)
    live = (seq >= batch.num_decodes) & (seq < batch.num_seqs)

    inside = jnp.clip(table.checkpoint_lens - to_len[:, None], begin[:, None], end[:, None])
    stops = jnp.concatenate([jnp.sort(inside, axis=1), end[:, None]], axis=1)
    starts = jnp.concatenate([begin[:, None], stops[:, :-1]], axis=1)
    counts = -(-(stops - starts) // length)
    counts = counts.at[:, -1].max((begin == end).astype(counts.dtype))
    counts = jnp.where(live[:, None], counts, 0).reshape(-1)

    last = jnp.cumsum(counts)
    chunk = jnp.arange(-(-tokens // length) + rows * (kept + 1), dtype=jnp.int32)
    segment = jnp.minimum(jnp.searchsorted(last, chunk, side="right"), rows * (kept + 1) - 1)
    first = starts.reshape(-1)[segment] + (chunk - (last - counts)[segment]) * length
    stop = jnp.minimum(first + length, stops.reshape(-1)[segment])
    row = segment // (kept + 1)
    real = chunk < last[-1]
    chunks = Chunks(
        seq=row,
        first=jnp.where(real, first, tokens),
        num_tokens=jnp.where(real, stop - first, 0),
        opens=real & (first == begin[row]),
        closes=real & (stop == end[row]),
        seq_len=stop + to_len[row],
        num_live=last[-1:],
    )
    return Chunks(*(x.astype(jnp.int32) for x in chunks))


def tile(x: jax.Array, chunks: Chunks, length: int) -> jax.Array:
    """The chunks' rows of `[T, ...]`, float32 `[N, length, ...]`; 0 past a chunk's tokens."""
    members = jnp.clip(chunks.first[:, None] + jnp.arange(length), 0, x.shape[0] - 1)
    valid = jnp.arange(length) < chunks.num_tokens[:, None]
    return jnp.where(valid.reshape(*valid.shape, *(1 for _ in x.shape[1:])), x[members], 0).astype(
        jnp.float32
    )


def untile(tiles: jax.Array, chunks: Chunks, batch: RaggedBatch) -> jax.Array:
    """Results `[N, length, ...]` in token order `[T, ...]`; of any value for tokens in no chunk."""
    token = jnp.arange(batch.positions.shape[0], dtype=jnp.int32)
    chunk = jnp.maximum(jnp.searchsorted(chunks.first, token, side="right") - 1, 0)
    offset = jnp.clip(token - chunks.first[chunk], 0, tiles.shape[1] - 1)
    return tiles[chunk, offset]


def merge(decoded: jax.Array, prefilled: jax.Array | None, batch: RaggedBatch) -> jax.Array:
    """Outputs `[T, ...]` from those of decodes `[S, ...]` and, in token order, of prefills; 0 for padding."""
    rows = batch.seq_lens.shape[0]
    tokens = batch.positions.shape[0]
    seq = jnp.minimum(batch.seq_ids, rows - 1)
    wide = (tokens, *(1 for _ in decoded.shape[1:]))
    out = jnp.where((batch.seq_ids < batch.num_decodes).reshape(wide), decoded[seq], 0)
    if prefilled is None:
        return out
    in_prefill = (batch.seq_ids >= batch.num_decodes) & (batch.seq_ids < rows)
    return jnp.where(in_prefill.reshape(wide), prefilled, out)


def first_rows(x: jax.Array, rows: int) -> jax.Array:
    """The decodes' rows of `[T, ...]`, float32 `[rows, ...]`: token i belongs to sequence i."""
    spare = max(rows - x.shape[0], 0)
    return jnp.pad(x[:rows], ((0, spare), *((0, 0),) * (x.ndim - 1))).astype(jnp.float32)
