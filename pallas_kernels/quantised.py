"""Numbers of 8 bits and their scales: a token's K, or its V, of one head is quantised on its own.

The scale is the largest magnitude over the largest number of the type, so that nothing is cut off: an int8 is
then at most half a scale from its number, and a float8_e4m3fn (three bits of mantissa) within 1/16 of it, or
within 2**-10 scales where that is more. A vector with a NaN or an infinity is NaN throughout.

A number half way between two must not go one way in one program and the other way in another, since programs
divide differently in the last bit (and elements of bfloat16 are often half way): all are a little enlarged.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

QUANTISED_DTYPES = ("float8_e4m3fn", "int8")
LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
"""The largest number of each type; int8 is used symmetrically."""

TIE_BREAK = 1 + 2.0**-18  # what numbers are enlarged by: 1/2,000 of a step at most
MINUS_ZERO = 0x80  # of a float8 is not kept: the one that v5's and v6's matrix units take has NaN there
SMALLEST = 1e-30  # vectors with no larger magnitude are kept as zeros: the quotient below stays finite


class Quantised(NamedTuple):
    """`bits uint32[..., D]`, a number's 8 bits each, and `scale float32[..., 1]`."""

    bits: jax.Array
    scale: jax.Array


def quantise(x: jax.Array, dtype: str) -> Quantised:
    """`x [..., D]` of any float dtype in `dtype`. The scale of a vector that is not finite is NaN."""
    x = x.astype(jnp.float32)
    most = jnp.abs(x).max(axis=-1, keepdims=True)
    # A product, as XLA makes one of a quotient by a constant, or does not: scales must not depend on that.
    scale = jnp.where(most < jnp.inf, most * jnp.float32(1 / LARGEST[dtype]), jnp.nan)
    steps = x * jnp.where(most > SMALLEST, jnp.float32(LARGEST[dtype] * TIE_BREAK) / most, 0)
    small = jnp.round(steps).astype(jnp.int8) if dtype == "int8" else steps.astype(jnp.float8_e4m3fn)
    bits = lax.bitcast_convert_type(small, jnp.uint8).astype(jnp.uint32)
    if dtype != "int8":
        bits = jnp.where(bits == MINUS_ZERO, 0, bits)
    return Quantised(bits, scale)


def pack_bytes(parts: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
    """Words of four bytes each, the first lowest, of four arrays `uint32` below 256."""
    first, second, third, fourth = parts
    return first | (second << 8) | (third << 16) | (fourth << 24)


def numbers_of_byte(words: jax.Array, byte: int, dtype: str) -> jax.Array:
    """Float32 of the numbers in byte 0 (lowest) to 3 of `words uint32`, without their scale."""
    if dtype == "int8":
        return (lax.bitcast_convert_type(words << (24 - 8 * byte), jnp.int32) >> 24).astype(jnp.float32)
    # As a float16 whose exponent has one bit more: a CPU turns those into float32 three times as fast.
    bits = (words >> (8 * byte)) & 0xFF
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).astype(jnp.uint16)
    exponents_apart = 256.0  # a bias of 15 in float16, of 7 in float8_e4m3fn
    return lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) * exponents_apart
