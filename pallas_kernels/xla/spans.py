"""Attention of some queries of one sequence over the live blocks they see, chunk by chunk."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import GroupTable
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.xla.chunks import Live, Softmax, attend_chunk, gather_blocks


class Span(NamedTuple):
    """Positions [start, stop) of sequence `seq` that some query of a tile sees."""

    seq: jax.Array
    start: jax.Array
    stop: jax.Array


class Tile(NamedTuple):
    """Scaled float32 queries `[Hkv, R, D]`; row r sees (`after[r]`, `until[r]`], or with None the span.

    `sinks [Hkv, R]` are the rows' sinks, or None.
    """

    q: jax.Array
    after: jax.Array | None
    until: jax.Array | None
    sinks: jax.Array | None


def attend_span(
    tile: Tile,
    span: Span,
    pages: jax.Array,
    table: GroupTable,
    settings: AttentionSettings,
    chunks: list[int],
) -> jax.Array:
    """Attention of a tile over a span, `[Hkv, R, Dv]`; `chunks` are sizes in blocks, largest first."""
    block_size = settings.layout.block_size
    first_block = table.first_block[span.seq]
    entry = span.start // block_size - first_block
    end = -(-span.stop // block_size) - first_block
    state = _start(tile, settings)
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


def attend_run(
    tile: Tile, span: Span, pages: jax.Array, table: GroupTable, settings: AttentionSettings, blocks: int
) -> jax.Array:
    """The same over a span of at most `blocks` blocks, in one chunk of that size."""
    entry = span.start // settings.layout.block_size - table.first_block[span.seq]
    state = _start(tile, settings)
    return _attend_entries(tile, span, pages, table, settings, entry, blocks, state).result()


def _start(tile: Tile, settings: AttentionSettings) -> Softmax:
    return Softmax.start((*tile.q.shape[:2], settings.layout.value_size), tile.sinks)


def _attend_entries(
    tile: Tile,
    span: Span,
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


def blocks_of(tokens: int, table: GroupTable, settings: AttentionSettings) -> int:
    """Blocks of a chunk of about `tokens` tokens: no more than the table has or a span can touch."""
    block_size = settings.layout.block_size
    blocks = max(tokens // block_size, 1)
    if settings.span is not None:
        blocks = min(blocks, (settings.span - 2) // block_size + 2)
    return max(min(blocks, table.block_ids.shape[1]), 1)
