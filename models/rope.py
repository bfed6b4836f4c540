"""Rotary position embeddings (https://arxiv.org/abs/2104.09864) in the half-split form: (x1, x2) are the two
halves."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rotation(NamedTuple):
    """Cosines and sines, float32[T, 1, turning / 2], of every token's angles."""

    cos: jax.Array
    sin: jax.Array


def rotation(
    positions: jax.Array,
    turning: int,
    theta: float,
    scaling_factor: float = 1.0,
    fraction: float = 1.0,
) -> Rotation:
    """Angles positions / scaling_factor * theta^(-2i / turning) for i < turning / 2 ("linear" scaling).

    fraction: of the angles, the fastest; the others stay 0 ("proportional" rotation).
    """
    exponents = jnp.arange(0, turning, 2, dtype=jnp.float32) / turning
    frequencies = 1.0 / (theta**exponents) / scaling_factor
    frequencies = jnp.where(jnp.arange(len(exponents)) < int(fraction * turning // 2), frequencies, 0.0)
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    # Without the barrier XLA's CPU backend computes both anew in every layer, for every head of Q and of K.
    return Rotation(*jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles))))


def rotate(x: jax.Array, turn: Rotation) -> jax.Array:
    """Turns the first `turning` elements of x[T, H, head_size] by its tokens' angles, in float32, rounded
    once to x's dtype. The others stay as they are."""
    turning = 2 * turn.cos.shape[-1]
    first, second = jnp.split(x[..., :turning].astype(jnp.float32), 2, axis=-1)
    turned = (first * turn.cos - second * turn.sin, second * turn.cos + first * turn.sin)
    return jnp.concatenate([*(part.astype(x.dtype) for part in turned), x[..., turning:]], axis=-1)
