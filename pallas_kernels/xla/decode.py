"""Decodes: one sequence after another, each over a padded run of its live blocks.

One chunk is cheaper than several: a sequence takes the smallest of a few sizes that holds its live blocks (a
window layer: the window's), and a branch is compiled for each size. Entries past the live ones are gathered
but never counted. Sequences are not gathered together: measured, that was no faster.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.xla.spans import Span, Tile, attend_run, attend_span, blocks_of

SMALLEST_RUN = 256  # tokens of the smallest run; fewer and larger sizes compile faster
LARGEST_RUN = 2048  # tokens of the largest run of a full layer; beyond, a loop over chunks of this size
LAST_CHUNKS = 128  # tokens of the chunks that end that loop


def attend_decodes(
    out: jax.Array,
    q: jax.Array,
    pages: jax.Array,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
) -> jax.Array:
    """`out [T, Hq, Dv]` with the rows of decodes filled in."""
    heads, head_size = settings.layout.num_kv_heads, settings.layout.head_size
    block_size = settings.layout.block_size
    sizes = _run_sizes(table, settings)

    def in_chunks(tile: Tile, span: Span, pages: jax.Array) -> jax.Array:
        chunks = [blocks_of(tokens, table, settings) for tokens in (LARGEST_RUN, LAST_CHUNKS)]
        return attend_span(tile, span, pages, table, settings, chunks)

    def in_one_run(blocks: int, tile: Tile, span: Span, pages: jax.Array) -> jax.Array:
        return attend_run(tile, span, pages, table, settings, blocks)

    branches: list[Callable[[Tile, Span, jax.Array], jax.Array]] = [
        partial(in_one_run, size) for size in sizes
    ]
    if settings.span is None and sizes[-1] < table.block_ids.shape[1]:
        branches.append(in_chunks)

    def attend_one(seq: jax.Array, out: jax.Array) -> jax.Array:
        stop = batch.seq_lens[seq]
        start = settings.first_visible(stop - 1)
        row = lax.dynamic_slice_in_dim(q, seq, 1).astype(jnp.float32) * settings.scale
        tile = Tile(row.reshape(heads, -1, head_size), None, None, settings.sinks_by_row(heads, 1))
        live = -(-stop // block_size) - start // block_size
        which = (live > jnp.array(sizes[: len(branches) - 1], jnp.int32)).sum(dtype=jnp.int32)
        mean = lax.switch(which, branches, tile, Span(seq, start, stop), pages)
        mean = mean.reshape(1, -1, out.shape[2])
        return lax.dynamic_update_slice_in_dim(out, mean.astype(out.dtype), seq, 0)

    return lax.fori_loop(0, batch.num_decodes, attend_one, out)


def _run_sizes(table: GroupTable, settings: AttentionSettings) -> list[int]:
    """Sizes of runs in blocks, ascending; the last holds any span, or is the largest of a full layer."""
    block_size = settings.layout.block_size
    span = settings.span
    largest = blocks_of(LARGEST_RUN if span is None else span + 2 * block_size, table, settings)
    sizes, size = [], max(SMALLEST_RUN // block_size, 1)
    while size * 4 <= largest * 3:
        sizes.append(size)
        size *= 2
    return [*sizes, largest]
