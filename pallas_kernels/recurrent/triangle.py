"""Inverses of unit lower triangular matrices with matrix products."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

SMALLEST = 8
"""Size of the diagonal blocks that are inverted as a power series. It ends there (the powers of a strictly
triangular matrix of size 8 vanish), and its terms are still small enough not to cancel digits away."""


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The matrix product in float32."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def unit_lower_inverse(
    lowers: list[jax.Array], product: Callable[[jax.Array, jax.Array], jax.Array] = product
) -> list[jax.Array]:
    """`(I + A)^-1` for strictly lower triangular A `[..., L, L]`.

    Blocks on the diagonal first, `(I - A)(I + A^2)(I + A^4)`; then blocks of twice the size from the inverses
    X, Z of two neighbours and what lies below them, Y: the corner is -Z Y X. Each stage runs over all of the
    list, so that a compiler can let their products overlap.
    """
    length = lowers[0].shape[-1]
    row = lax.broadcasted_iota(jnp.int32, (length, length), 0)
    column = lax.broadcasted_iota(jnp.int32, (length, length), 1)
    identity = (row == column).astype(jnp.float32)
    inside = row // SMALLEST == column // SMALLEST
    powers = [jnp.where(inside, a, 0) for a in lowers]
    inverses = [identity - power for power in powers]
    for _ in range(2):
        powers = [product(power, power) for power in powers]
        inverses = [x + product(x, power) for x, power in zip(inverses, powers, strict=True)]
    size = SMALLEST
    while size < length:
        corner = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
        below = [product(jnp.where(corner, a, 0), x) for a, x in zip(lowers, inverses, strict=True)]
        inverses = [x - product(x, y) for x, y in zip(inverses, below, strict=True)]
        size *= 2
    return inverses
