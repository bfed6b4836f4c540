"""Reading a run of a sequence's blocks, and the running softmax over such runs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import LANES, AttentionPageLayout, KeysValues, float_of, unpack_pair
from pallas_kernels.settings import AttentionSettings

HIDDEN = -1e30  # a masked score: exp gives 0, and a difference of two of them is not NaN


class Softmax(NamedTuple):
    """A softmax under way over rows of scores: `top`, `total` float32 `[Hkv, R]`, `weighted` float32 `[Hkv, R, D]`."""

    top: jax.Array
    total: jax.Array
    weighted: jax.Array

    @classmethod
    def empty(cls, heads: int, rows: int, head_size: int) -> "Softmax":
        """Nothing seen yet."""
        return cls(
            jnp.full((heads, rows), HIDDEN, jnp.float32),
            jnp.zeros((heads, rows), jnp.float32),
            jnp.zeros((heads, rows, head_size), jnp.float32),
        )

    def result(self) -> jax.Array:
        """The weighted mean, `[Hkv, R, D]`; 0 for rows that saw nothing."""
        return self.weighted / jnp.where(self.total > 0, self.total, 1)[..., None]


def gather_blocks(pages: jax.Array, page_ids: jax.Array, layout: AttentionPageLayout) -> KeysValues:
    """K and V of whole pages in order, float32 `[Hkv, N * block_size, D]` each, for `page_ids int32[N]`.

    Each plane is gathered on its own, which lands it in the order that the products want without a second copy.
    """
    heads = layout.num_kv_heads
    planes = [_gather_plane(pages, page_ids, layout, plane) for plane in range(layout.planes)]
    planes = [x.reshape(heads, -1, layout.head_size) for x in planes]
    if layout.planes == 1:
        return unpack_pair(planes[0])
    return KeysValues(float_of(planes[0]), float_of(planes[1]))


def _gather_plane(
    pages: jax.Array, page_ids: jax.Array, layout: AttentionPageLayout, plane: int
) -> jax.Array:
    """Words of one plane of every head: `uint32[Hkv, N, ...]` with `plane_words` words in the trailing axes."""
    heads, words = layout.num_kv_heads, layout.plane_words
    if words % LANES == 0:
        operand, unit, window = pages, words // LANES, (words // LANES, LANES)
    else:  # tiny heads: a plane is not whole rows
        operand = pages.reshape(pages.shape[0], layout.page_rows * LANES)
        unit, window = words, (words,)
    start = (jnp.arange(heads, dtype=jnp.int32) * layout.planes + plane) * unit
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

    V of slots that no row sees must be finite already (`hide_values`).
    """
    scores = _scores(q, chunk.keys)
    if settings.softcap is not None:
        scores = settings.softcap * jnp.tanh(scores / settings.softcap)
    scores = jnp.where(visible, scores, HIDDEN)
    top = jnp.maximum(state.top, scores.max(axis=-1))
    weights = jnp.where(visible, jnp.exp(scores - top[..., None]), 0)
    shrink = jnp.exp(state.top - top)
    return Softmax(
        top,
        state.total * shrink + weights.sum(axis=-1),
        state.weighted * shrink[..., None] + _combine(weights, chunk.values),
    )


def hide_values(chunk: KeysValues, live: jax.Array) -> KeysValues:
    """Zeroes V of the slots outside `live bool[N]`: a weight of 0 does not hide a NaN."""
    return KeysValues(chunk.keys, jnp.where(live[:, None], chunk.values, 0))


def _scores(q: jax.Array, keys: jax.Array) -> jax.Array:
    """`[Hkv, R, D] x [Hkv, N, D] -> [Hkv, R, N]`. One head is a plain product: XLA's CPU is twice as fast with it."""
    highest = lax.Precision.HIGHEST
    if q.shape[0] > 1:
        return jnp.einsum("hrd,hnd->hrn", q, keys, precision=highest)
    if q.shape[1] < 32:  # few rows: the long operand first, again for XLA's CPU
        return jnp.dot(keys[0], q[0].T, precision=highest).T[None]
    return jnp.dot(q[0], keys[0].T, precision=highest)[None]


def _combine(weights: jax.Array, values: jax.Array) -> jax.Array:
    """`[Hkv, R, N] x [Hkv, N, D] -> [Hkv, R, D]`."""
    highest = lax.Precision.HIGHEST
    if weights.shape[0] > 1:
        return jnp.einsum("hrn,hnd->hrd", weights, values, precision=highest)
    return jnp.dot(weights[0], values[0], precision=highest)[None]
