"""The plain form: one dense mask over every slot of every table, in float32. What the others must equal."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.layout import LANES
from pallas_kernels.settings import AttentionSettings


def paged_attention_reference(
    q: jax.Array, pages: jax.Array, batch: RaggedBatch, table: GroupTable, settings: AttentionSettings
) -> jax.Array:
    """Attention of `q [T, Hq, D]` over the pages of its sequences: `[T, Hq, Dv]` in q's dtype.

    A token at position p sees the positions from `settings.first_visible(p)` to p. Padding tokens get zeros.
    """
    layout = settings.layout
    tokens, q_heads, head_size = q.shape
    rows, width = table.block_ids.shape
    page_ids = table.block_ids * settings.layer_slots + settings.layer_slot
    kept = layout.unpack_page(pages[page_ids])  # [S, W, Hkv, block, D or Dv]
    slots = rows * width * layout.block_size
    keys, values = (x.transpose(0, 1, 3, 2, 4).reshape(slots, layout.num_kv_heads, x.shape[-1]) for x in kept)

    slot_block = table.first_block[:, None] + jnp.arange(width)
    slot_position = (slot_block[:, :, None] * layout.block_size + jnp.arange(layout.block_size)).reshape(-1)
    slot_seq = jnp.repeat(jnp.arange(rows), width * layout.block_size)
    position = batch.positions[:, None]
    visible = (batch.seq_ids[:, None] == slot_seq) & (slot_position <= position)
    visible &= slot_position >= settings.first_visible(position)

    # A slot that no query sees may hold anything, NaN included: 0 * NaN must not reach the result.
    seen = visible.any(axis=0)[:, None, None]
    keys, values = jnp.where(seen, keys, 0), jnp.where(seen, values, 0)
    grouped = q.astype(jnp.float32).reshape(tokens, layout.num_kv_heads, -1, head_size)
    highest = lax.Precision.HIGHEST
    scores = jnp.einsum("thgd,nhd->thgn", grouped, keys, precision=highest) * settings.scale
    if settings.softcap is not None:
        scores = settings.softcap * jnp.tanh(scores / settings.softcap)
    visible = visible[:, None, None, :]
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    sinks = settings.sinks_by_row(layout.num_kv_heads, 1)
    if sinks is not None:
        top = jnp.maximum(top, sinks[..., None])
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.where(visible, jnp.exp(scores - top), 0)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks[..., None] - top)
    weights = weights / jnp.where(total > 0, total, 1)
    out = jnp.einsum("thgn,nhd->thgd", weights, values, precision=highest)
    return out.reshape(tokens, q_heads, layout.value_size).astype(q.dtype)


def write_kv_reference(
    pages: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
) -> jax.Array:
    """The pool after writing `k [T, Hkv, D]` and `v [T, Hkv, Dv]`, one word at a time; None: `k` is latents.

    Padding tokens change nothing.
    """
    layout = settings.layout
    rows, width = table.block_ids.shape
    seq = jnp.minimum(batch.seq_ids, rows - 1)
    entry = batch.positions // layout.block_size - table.first_block[seq]
    page = table.block_ids[seq, jnp.clip(entry, 0, width - 1)] * settings.layer_slots + settings.layer_slot
    page = jnp.where(batch.seq_ids < rows, page, pages.shape[0])
    head = jnp.arange(layout.num_kv_heads)[:, None]
    token = (batch.positions % layout.block_size)[:, None, None]
    for plane, words in enumerate(layout.pack_tokens(k, v)):
        size = words.shape[2]
        word = layout.first_word(head, plane) + token * size + jnp.arange(size)
        pages = pages.at[page[:, None, None], word // LANES, word % LANES].set(words, mode="drop")
    return pages
