"""What a TPU kernel does with a chunk of pages in VMEM: unpack words, score, add to the running softmax."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.layout import LANES, AttentionPageLayout, float_of

HIDDEN = -1e30


@dataclass(frozen=True, kw_only=True)
class ChunkMath:
    """Static half of the mathematics; `group` is the number of query heads that share a KV head."""

    layout: AttentionPageLayout
    group: int
    scale: float
    sliding_window: int | None
    softcap: float | None

    def add_chunk(self, q_ref, buffer, softmax, *, first_position, query_position, start, stop) -> None:
        """Adds the chunk in `buffer [blocks, rows, 128]`, whose first slot is `first_position`.

        `q_ref [Hkv, rows, D]`: row r is query `r // group` of the tile, at `query_position + r // group`.
        Slots outside [start, stop) may hold anything. `softmax` is three float32 refs: top and total
        `[Hkv, rows, 128]` (all lanes equal), weighted `[Hkv, rows, D]`.
        """
        tokens = buffer.shape[0] * self.layout.block_size

        # A weight of 0 does not hide a NaN: zero the slots that hold nothing. Inner chunks have none.
        @pl.when((first_position < start) | (first_position + tokens > stop))
        def _():
            self._clear(buffer, start - first_position, stop - first_position)

        rows = q_ref.shape[1]
        slot = first_position + lax.broadcasted_iota(jnp.int32, (rows, tokens), 1)
        query = query_position + lax.broadcasted_iota(jnp.int32, (rows, tokens), 0) // self.group
        visible = slot <= query
        if self.sliding_window is not None:
            visible &= slot > query - self.sliding_window
        for head in range(self.layout.num_kv_heads):
            self._add_head(head, q_ref, buffer, softmax, visible)

    def _add_head(self, head: int, q_ref, buffer, softmax, visible: jax.Array) -> None:
        top_ref, total_ref, weighted_ref = softmax
        products = q_ref.dtype
        parts = self.layout.head_size // LANES
        precision = None if products == jnp.bfloat16 else lax.Precision.HIGHEST
        keys, values = zip(*(self._load(head, part, buffer, products) for part in range(parts)), strict=True)

        scores = sum(
            lax.dot_general(
                q_ref[head, :, part * LANES : (part + 1) * LANES],
                keys[part],
                (((1,), (1,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            for part in range(parts)
        )
        scores = scores * self.scale
        if self.softcap is not None:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        scores = jnp.where(visible, scores, HIDDEN)
        old_top = top_ref[head]
        top = jnp.maximum(old_top, scores.max(axis=1, keepdims=True))
        weights = jnp.exp(scores - top[:, :1])
        shrink = jnp.exp(old_top - top)
        top_ref[head] = top
        total_ref[head] = total_ref[head] * shrink + weights.sum(axis=1, keepdims=True)
        for part in range(parts):
            lanes = slice(part * LANES, (part + 1) * LANES)
            weighted_ref[head, :, lanes] = weighted_ref[head, :, lanes] * shrink + jnp.dot(
                weights.astype(products),
                values[part],
                precision=precision,
                preferred_element_type=jnp.float32,
            )

    def _load(self, head: int, part: int, buffer, products) -> tuple[jax.Array, jax.Array]:
        """K and V `[tokens, 128]` of one head, lanes `part * 128` onwards, in the dtype of the products."""
        words = [self._load_words(head, plane, part, buffer) for plane in range(self.layout.planes)]
        if self.layout.planes == 1:
            keys, values = words[0] << 16, words[0] & jnp.uint32(0xFFFF0000)
        else:
            keys, values = words
        return float_of(keys).astype(products), float_of(values).astype(products)

    def _load_words(self, head: int, plane: int, part: int, buffer) -> jax.Array:
        """A token of a head is `head_size / 128` rows: take every so many."""
        size, parts = self.layout.block_size, self.layout.head_size // LANES
        row = (head * self.layout.planes + plane) * size * parts + part
        rows = pl.ds(row, size) if parts == 1 else pl.ds(row, size, stride=parts)
        return buffer[:, rows].reshape(-1, LANES)

    def _clear(self, buffer, start, stop) -> None:
        """Zeroes the words of slots outside [start, stop), counted from the chunk's first."""
        parts = self.layout.head_size // LANES
        row = lax.broadcasted_iota(jnp.int32, buffer.shape, 1)
        token = (row // parts) % self.layout.block_size
        token += lax.broadcasted_iota(jnp.int32, buffer.shape, 0) * self.layout.block_size
        buffer[...] = jnp.where((token >= start) & (token < stop), buffer[...], jnp.uint32(0))
