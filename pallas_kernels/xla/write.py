"""Writing a step's K and V into the pool with one scatter."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.layout import LANES, AttentionPageLayout
from pallas_kernels.settings import AttentionSettings


def write_kv_xla(
    pages: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
) -> jax.Array:
    """Same contract as `write_kv_reference`: tokens one after another, padding is never reached."""
    layout = settings.layout
    planes = layout.pack_tokens(k, v)
    rows, width = table.block_ids.shape
    seq = jnp.minimum(batch.seq_ids, rows - 1)
    entry = jnp.clip(batch.positions // layout.block_size - table.first_block[seq], 0, width - 1)
    page = table.block_ids[seq, entry] * settings.layer_slots + settings.layer_slot
    slot = batch.positions % layout.block_size
    in_rows = _fits_rows(layout)
    operand = pages if in_rows else pages.reshape(pages.shape[0], layout.page_rows * LANES)
    count = batch.query_starts[batch.num_seqs]

    def write_token(token: jax.Array, pool: jax.Array) -> jax.Array:
        for plane, words in enumerate(planes):
            size = words.shape[2]
            piece = lax.dynamic_slice_in_dim(words, token, 1)
            window = (max(size // LANES, 1), min(size, LANES)) if in_rows else (size,)
            for head in range(layout.num_kv_heads):
                word = layout.first_word(head, plane) + slot[token] * size
                at = (page[token], word // LANES, word % LANES) if in_rows else (page[token], word)
                pool = lax.dynamic_update_slice(pool, piece[:, head].reshape(1, *window), at)
        return pool

    return lax.fori_loop(0, count, write_token, operand).reshape(pages.shape)


def _fits_rows(layout: AttentionPageLayout) -> bool:
    """Whether no part of a token goes on in the next row of 128 words, unless it is whole rows.

    Tokens are then addressed in the pool as it is: a TPU would copy it to reshape it.
    """
    return all(
        max(size, LANES) % min(size, LANES) == 0 and layout.first_word(head, plane) % min(size, LANES) == 0
        for plane, size in enumerate(layout.token_words)
        for head in range(layout.num_kv_heads)
    )
