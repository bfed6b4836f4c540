"""Paged attention in plain XLA: loops with dynamic bounds over live blocks only.

Decodes: one sequence after another; its live blocks (a window layer: the window's) in large chunks, then
what is left in small ones. Prefill: tiles of queries, each over the chunks its queries can see. No shape
depends on a length, so nothing compiles again when lengths change.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.xla.chunks import Live, Softmax, attend_chunk, gather_blocks

LARGE_CHUNK = 2048  # tokens of a decode's chunk while many are left
SMALL_CHUNK = 128  # tokens of a decode's chunk for what is left
QUERY_TILE = 128
PREFILL_CHUNK = 256


class _Span(NamedTuple):
    """Positions [start, stop) of sequence `seq` that some query of a tile sees."""

    seq: jax.Array
    start: jax.Array
    stop: jax.Array


class _Tile(NamedTuple):
    """Scaled float32 queries `[Hkv, R, D]`; row r sees (`after[r]`, `until[r]`], or with None the span."""

    q: jax.Array
    after: jax.Array | None
    until: jax.Array | None


def paged_attention_xla(
    q: jax.Array, pages: jax.Array, batch: RaggedBatch, table: GroupTable, settings: AttentionSettings
) -> jax.Array:
    """Same contract as `paged_attention_reference`."""
    out = jnp.zeros_like(q)
    out = _attend_decodes(out, q, pages, batch, table, settings)
    if batch.decode_only:
        return out
    return _attend_prefills(out, q, pages, batch, table, settings)


def _attend_decodes(
    out: jax.Array,
    q: jax.Array,
    pages: jax.Array,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
) -> jax.Array:
    heads, head_size = settings.layout.num_kv_heads, settings.layout.head_size
    chunks = [_blocks_of(tokens, table, settings) for tokens in (LARGE_CHUNK, SMALL_CHUNK)]

    def attend_one(seq: jax.Array, out: jax.Array) -> jax.Array:
        length = batch.seq_lens[seq]
        start = jnp.int32(0)
        if settings.sliding_window is not None:
            start = jnp.maximum(length - settings.sliding_window, 0)
        row = lax.dynamic_slice_in_dim(q, seq, 1).astype(jnp.float32) * settings.scale
        tile = _Tile(row.reshape(heads, -1, head_size), None, None)
        mean = _attend_span(tile, _Span(seq, start, length), pages, table, settings, chunks)
        return lax.dynamic_update_slice_in_dim(out, mean.reshape(1, -1, head_size).astype(out.dtype), seq, 0)

    return lax.fori_loop(0, batch.num_decodes, attend_one, out)


def _attend_prefills(
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
    chunks = [_blocks_of(PREFILL_CHUNK, table, settings)]

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
            if settings.sliding_window is not None:
                start = jnp.maximum(first + to_position - settings.sliding_window + 1, 0)
                after = until - settings.sliding_window
            window = lax.dynamic_slice_in_dim(q, base, size).astype(jnp.float32) * settings.scale
            window = window.reshape(size, heads, -1, head_size).transpose(1, 0, 2, 3)
            group = q_heads // heads
            tile = _Tile(
                window.reshape(heads, size * group, head_size),
                jnp.repeat(after, group),
                jnp.repeat(until, group),
            )
            span = _Span(seq, start, last + to_position + 1)
            mean = _attend_span(tile, span, pages, table, settings, chunks)
            mean = (
                mean.reshape(heads, size, group, head_size)
                .transpose(1, 0, 2, 3)
                .reshape(size, q_heads, head_size)
            )
            old = lax.dynamic_slice_in_dim(out, base, size)
            new = jnp.where(mine[:, None, None], mean.astype(out.dtype), old)
            return lax.dynamic_update_slice_in_dim(out, new, base, 0)

        return lax.fori_loop(0, (end - begin + size - 1) // size, attend_tile, out)

    return lax.fori_loop(batch.num_decodes, batch.num_seqs, attend_sequence, out)


def _attend_span(
    tile: _Tile,
    span: _Span,
    pages: jax.Array,
    table: GroupTable,
    settings: AttentionSettings,
    chunks: list[int],
) -> jax.Array:
    """Attention of a tile over a span, `[Hkv, R, D]`; `chunks` are sizes in blocks, largest first."""
    block_size = settings.layout.block_size
    first_block = table.first_block[span.seq]
    entry = span.start // block_size - first_block
    end = -(-span.stop // block_size) - first_block
    state = Softmax.empty(*tile.q.shape)
    step = partial(_attend_entries, tile, span, pages, table, settings)
    for index, blocks in enumerate(chunks):
        last = index == len(chunks) - 1
        count = (end - entry + blocks - 1) // blocks if last else (end - entry) // blocks
        begin = entry
        state = lax.fori_loop(
            0, count, lambda i, s, begin=begin, blocks=blocks: step(begin + i * blocks, blocks, s), state
        )
        entry = entry + count * blocks
    return state.result()


def _attend_entries(
    tile: _Tile,
    span: _Span,
    pages: jax.Array,
    table: GroupTable,
    settings: AttentionSettings,
    entry: jax.Array,
    blocks: int,
    state: Softmax,
) -> Softmax:
    """Adds `blocks` table entries from `entry` on. Near the table's end the slice starts earlier, masked."""
    layout = settings.layout
    base = jnp.minimum(entry, table.block_ids.shape[1] - blocks)
    ids = lax.dynamic_slice(table.block_ids, (span.seq, base), (1, blocks))[0]
    first_position = (table.first_block[span.seq] + base) * layout.block_size
    positions = first_position + jnp.arange(blocks * layout.block_size)
    # Slots before `entry` were added by the previous chunk.
    begin = jnp.maximum(span.start, first_position + (entry - base) * layout.block_size)
    live = (positions >= begin) & (positions < span.stop)
    page_ids = ids * settings.layer_slots + settings.layer_slot
    chunk = gather_blocks(pages, page_ids, Live(begin - first_position, span.stop - first_position), layout)
    visible = live[None, :]
    if tile.after is not None and tile.until is not None:
        visible = visible & (positions > tile.after[:, None]) & (positions <= tile.until[:, None])
    return attend_chunk(state, tile.q, chunk, visible, settings)


def _blocks_of(tokens: int, table: GroupTable, settings: AttentionSettings) -> int:
    """Blocks of a chunk of about `tokens` tokens: no more than the table has or a window can touch."""
    block_size = settings.layout.block_size
    blocks = max(tokens // block_size, 1)
    if settings.sliding_window is not None:
        blocks = min(blocks, (settings.sliding_window - 2) // block_size + 2)
    return max(min(blocks, table.block_ids.shape[1]), 1)
