"""Reading a run of a sequence's blocks, and the running softmax over such runs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import LANES, AttentionPageLayout, KeysValues
from pallas_kernels.settings import AttentionSettings

HIDDEN = -1e30  # a masked score: exp gives 0, and a difference of two of them is not NaN


class Softmax(NamedTuple):
    """A softmax under way, float32: `top`, `total` `[Hkv, R]` and `weighted` `[Hkv, R, Dv]`."""

    top: jax.Array
    total: jax.Array
    weighted: jax.Array

    @classmethod
    def start(cls, shape: tuple[int, ...], sinks: jax.Array | None) -> "Softmax":
        """For results of `shape [Hkv, R, Dv]`: nothing seen but the sinks `[Hkv, R]`, which have no value."""
        weighted = jnp.zeros(shape, jnp.float32)
        if sinks is None:
            return cls(jnp.full(shape[:2], HIDDEN, jnp.float32), weighted[..., 0], weighted)
        return cls(sinks, jnp.ones(shape[:2], jnp.float32), weighted)

    def result(self) -> jax.Array:
        """The weighted mean, `[Hkv, R, Dv]`; finite and without meaning for rows that saw nothing."""
        return self.weighted / jnp.where(self.total > 0, self.total, 1)[..., None]


class Live(NamedTuple):
    """Tokens [start, stop) of a gathered run, counted from its first."""

    start: jax.Array
    stop: jax.Array


def gather_blocks(
    pages: jax.Array, page_ids: jax.Array, live: Live, layout: AttentionPageLayout
) -> KeysValues:
    """K and V of whole pages in order, float32 `[Hkv, N * block_size, D or Dv]`, for `page_ids int32[N]`.

    V of slots outside `live` is 0: a weight of 0 would not hide a NaN there.

    XLA's CPU copies at memory speed only while the gather keeps its own shape, so unpacking and hiding happen
    in that shape and a barrier keeps the later reshape (no copy) out of the loop: 5 times faster.
    """
    planes = [_gather_plane(pages, page_ids, layout, plane) for plane in range(layout.planes)]
    strips = list(layout.strips(planes))
    for index, (size, holds_values) in enumerate(
        zip(layout.strip_sizes, layout.strips_hold_values, strict=True)
    ):
        if holds_values:
            tokens = _token_of_word(page_ids.shape[0], strips[index].shape[2:], size, layout)
            strips[index] = jnp.where((tokens >= live.start) & (tokens < live.stop), strips[index], 0)
    strips = lax.optimization_barrier(strips)
    heads = layout.num_kv_heads
    return layout.join(
        [strip.reshape(heads, -1, size) for strip, size in zip(strips, layout.strip_sizes, strict=True)]
    )


def _token_of_word(blocks: int, window: tuple[int, ...], size: int, layout: AttentionPageLayout) -> jax.Array:
    """Which token of a gathered run a word belongs to, int32, broadcasts to `[blocks, *window]`.

    A token is `size` words.
    """
    if len(window) == 2 and size % LANES == 0:
        in_block = jnp.arange(window[0], dtype=jnp.int32)[:, None] // (size // LANES)
    else:
        in_block = jnp.arange(layout.block_size * size, dtype=jnp.int32).reshape(window) // size
    start = jnp.arange(blocks, dtype=jnp.int32) * layout.block_size
    return start.reshape(blocks, *(1 for _ in window)) + in_block


def _gather_plane(
    pages: jax.Array, page_ids: jax.Array, layout: AttentionPageLayout, plane: int
) -> jax.Array:
    """Words of one plane of every head: `uint32[Hkv, N, ...]`, the plane's words in the axes after N."""
    words = layout.block_size * layout.token_words[plane]
    starts = [layout.first_word(head, plane) for head in range(layout.num_kv_heads)]
    start = jnp.array(starts, jnp.int32)
    if words % LANES == 0 and all(first % LANES == 0 for first in starts):
        operand, start, window = pages, start // LANES, (words // LANES, LANES)
    else:  # tiny heads, scales of short blocks: a plane is not whole rows
        operand, window = pages.reshape(pages.shape[0], layout.page_rows * LANES), (words,)
    where = jnp.stack(jnp.broadcast_arrays(page_ids[None, :], start[:, None]), axis=-1)
    return lax.gather(
        operand,
        where,
        lax.GatherDimensionNumbers(
            offset_dims=tuple(range(2, 2 + len(window))), collapsed_slice_dims=(0,), start_index_map=(0, 1)
        ),
        slice_sizes=(1, *window),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


def attend_chunk(
    state: Softmax, q: jax.Array, chunk: KeysValues, visible: jax.Array, settings: AttentionSettings
) -> Softmax:
    """Adds a chunk to the softmax: `q [Hkv, R, D]` already scaled, `visible bool[R or 1, N]`.

    V of slots that no row sees must be finite already (`gather_blocks`).
    """
    scores = _scores(q, chunk.keys)
    if settings.softcap is not None:
        scores = settings.softcap * jnp.tanh(scores / settings.softcap)
    scores = jnp.where(visible, scores, HIDDEN)
    top = jnp.maximum(state.top, scores.max(axis=-1))
    # A row that has seen nothing yet gives masked scores exp(0); the first visible one shrinks that to 0.
    weights = jnp.exp(scores - top[..., None])
    shrink = jnp.exp(state.top - top)
    return Softmax(
        top,
        state.total * shrink + weights.sum(axis=-1),
        state.weighted * shrink[..., None] + _combine(weights, chunk.values),
    )


def _scores(q: jax.Array, keys: jax.Array) -> jax.Array:
    """`[Hkv, R, D] x [Hkv, N, D] -> [Hkv, R, N]`. XLA's CPU is twice as fast without a batch axis."""
    highest = lax.Precision.HIGHEST
    if q.shape[0] > 1:
        return jnp.einsum("hrd,hnd->hrn", q, keys, precision=highest)
    return jnp.dot(q[0], keys[0].T, precision=highest)[None]


def _combine(weights: jax.Array, values: jax.Array) -> jax.Array:
    """`[Hkv, R, N] x [Hkv, N, Dv] -> [Hkv, R, Dv]`."""
    highest = lax.Precision.HIGHEST
    if weights.shape[0] > 1:
        return jnp.einsum("hrn,hnd->hrd", weights, values, precision=highest)
    return jnp.dot(weights[0], values[0], precision=highest)[None]
