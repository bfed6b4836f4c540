"""Exponentials of numbers that are not positive, in fewer instructions than XLA's own on a CPU."""

import jax
import jax.numpy as jnp
from jax import lax

LEAST = -126.0
"""The logarithm of the smallest normal float32: what is below counts as this."""
ROUNDER = 1.5 * 2**23
"""A float32 this large has no bits for fractions, and the lowest bits of a sum with it are the integer."""
COEFFICIENTS = (1.0, 0.6931470037, 0.2402224243, 0.0555073358, 0.0096715130, 0.0013264727)
"""Of the polynomial of 2^f for f in [-1/2, 1/2] that is 1 at 0 and else has the least relative error, 9e-8.
The nearer a decay is to one, the smaller its error, as it must be: it is taken once for every token."""


def exp2_of_negative(x: jax.Array) -> jax.Array:
    """2^x, float32, for x <= 0: a polynomial of the fraction, the integer added to the exponent's bits."""
    x = jnp.maximum(x, LEAST)
    shifted = x + ROUNDER
    fraction = x - (shifted - ROUNDER)
    value = jnp.full_like(x, COEFFICIENTS[-1])
    for coefficient in reversed(COEFFICIENTS[:-1]):
        value = value * fraction + coefficient
    bits = lax.bitcast_convert_type(value, jnp.uint32) + (lax.bitcast_convert_type(shifted, jnp.uint32) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)
