"""bfloat16 numbers from words, two at a time, in registers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LOW_SEVEN, HIGH_BIT = 0x007F007F, 0x00800080  # of the low byte of both halves of a word
ONE_TWENTY_EIGHT = 0x43004300  # bfloat16 in both halves; its seven bits of mantissa count ones
EXPONENTS_APART = 2.0**120  # a bias of 127 in bfloat16, of 7 in float8_e4m3fn


class Halves(NamedTuple):
    """Numbers in the low and the high halves of words, bfloat16 in the words' shape."""

    low: jax.Array
    high: jax.Array


def numbers_of_words(words: jax.Array, dtype: str, byte: int | None) -> Halves:
    """The pairs of bfloat16 in `words uint32`, or the 8-bit numbers (without their scale) in their bytes.

    Byte 0 is the lower one of each half, 1 the upper one.
    """
    if byte is None:
        return _split(words)
    octets = words >> (8 * byte)
    if dtype == "int8":
        # 128 + the lower seven bits, less 128 or, for negative numbers, 256: all of them exact.
        magnitude = _split((octets & LOW_SEVEN) | ONE_TWENTY_EIGHT)
        offset = _split((octets & HIGH_BIT) | ONE_TWENTY_EIGHT)
        return Halves(magnitude.low - offset.low, magnitude.high - offset.high)
    small = _split(((octets & HIGH_BIT) << 8) | ((octets & LOW_SEVEN) << 4))
    apart = jnp.bfloat16(EXPONENTS_APART)
    return Halves(small.low * apart, small.high * apart)


def _split(words: jax.Array) -> Halves:
    halves = words.astype(jnp.uint16), (words >> 16).astype(jnp.uint16)
    return Halves(*(lax.bitcast_convert_type(half, jnp.bfloat16) for half in halves))
