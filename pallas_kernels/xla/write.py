"""Writing a step's K and V into the pool with one scatter."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.layout import LANES
from pallas_kernels.settings import AttentionSettings


def write_kv_xla(
    pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
) -> jax.Array:
    """Same contract as `write_kv_reference`: tokens one after another, padding is never reached."""
    layout = settings.layout
    words = layout.pack_tokens(k, v)  # [T, Hkv, planes, D]
    rows, width = table.block_ids.shape
    seq = jnp.minimum(batch.seq_ids, rows - 1)
    entry = jnp.clip(batch.positions // layout.block_size - table.first_block[seq], 0, width - 1)
    page = table.block_ids[seq, entry] * settings.layer_slots + settings.layer_slot
    slot = batch.positions % layout.block_size
    if layout.rows_are_whole:
        operand, window = pages, (layout.head_size // LANES, LANES)
    elif LANES % layout.head_size == 0:  # a part of a row; a TPU would copy the pool to reshape it
        operand, window = pages, (1, layout.head_size)
    else:
        operand, window = pages.reshape(pages.shape[0], layout.page_rows * LANES), (layout.head_size,)
    count = batch.query_starts[batch.num_seqs]

    def write_token(token: jax.Array, pool: jax.Array) -> jax.Array:
        piece = lax.dynamic_slice_in_dim(words, token, 1)
        for head in range(layout.num_kv_heads):
            for plane in range(layout.planes):
                word = ((head * layout.planes + plane) * layout.block_size + slot[token]) * layout.head_size
                in_row = 0 if layout.rows_are_whole else word % LANES
                at = (page[token], word) if len(window) == 1 else (page[token], word // LANES, in_row)
                pool = lax.dynamic_update_slice(pool, piece[:, head, plane].reshape(1, *window), at)
        return pool

    return lax.fori_loop(0, count, write_token, operand).reshape(pages.shape)
