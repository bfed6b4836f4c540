"""Spans of tokens as windows of one length, for forms that compute all tokens of a span at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Chunk(NamedTuple):
    """Rows `first` up to `stop` (exclusive) are a chunk's tokens (`valid bool[L]`). Others hold anything."""

    inputs: Any
    first: jax.Array
    stop: jax.Array
    valid: jax.Array


def through_window(
    compute: Callable[[jax.Array, Chunk], tuple[jax.Array, jax.Array]],
    length: int,
    state: jax.Array,
    inputs: Any,
    out: jax.Array,
    first: jax.Array,
    stop: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`compute`'s state, and `out [T, ...]` with its outputs `[L, ...]` of tokens [first, stop).

    These are `length` at most.

    The window of the last tokens begins before them, so no input needs padding.
    """
    tokens = out.shape[0]
    length = min(length, tokens)
    start = jnp.minimum(first, tokens - length)
    window = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, length).astype(jnp.float32), inputs)
    row = start + jnp.arange(length)
    chunk = Chunk(window, first - start, stop - start, (row >= first) & (row < stop))
    state, new = compute(state, chunk)
    valid = chunk.valid.reshape(-1, *(1 for _ in out.shape[1:]))
    new = jnp.where(valid, new, lax.dynamic_slice_in_dim(out, start, length))
    return state, lax.dynamic_update_slice_in_dim(out, new, start, 0)
