"""Rotary position embeddings (https://arxiv.org/abs/2104.09864) in the half-split form: (x1, x2) are the two
halves."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rotation(NamedTuple):
    """Cosines and sines, float32[T, 1, head_size / 2], of every token's angles."""

    cos: jax.Array
    sin: jax.Array


def rotation(positions: jax.Array, head_size: int, theta: float, scaling_factor: float = 1.0) -> Rotation:
    """Angles positions / scaling_factor * theta^(-2i / head_size) for i < head_size / 2 ("linear"
    scaling)."""
    exponents = jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size
    frequencies = 1.0 / (theta**exponents) / scaling_factor
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: jax.Array, turn: Rotation) -> jax.Array:
    """Turns x[T, H, head_size] by its tokens' angles, in float32, rounded once to x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * turn.cos - second * turn.sin, second * turn.cos + first * turn.sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
