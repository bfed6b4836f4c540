"""Numbers as sums of bfloat16 terms, which is what tensor cores multiply.

A bfloat16 is one term. A float32 is three of 8 mantissa bits each; the six largest products of their terms
give the product of two float32 to float32's own precision.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import AttentionPageLayout, float_of

FLOAT32_TERMS = 3


def count_terms(dtype: jax.typing.DTypeLike) -> int:
    """Terms that hold every value of a float dtype of at most 32 bits."""
    return 1 if jnp.dtype(dtype) == jnp.bfloat16 else FLOAT32_TERMS


def terms_of(x: jax.Array, count: int) -> list[jax.Array]:
    """`x` as `count` bfloat16 terms, the largest first."""
    terms = [x.astype(jnp.bfloat16)]
    for _ in range(count - 1):
        x = x.astype(jnp.float32) - terms[-1].astype(jnp.float32)
        terms.append(x.astype(jnp.bfloat16))
    return terms


def add_products(
    total: jax.Array,
    a: Sequence[jax.Array],
    b: Sequence[jax.Array],
    add_product: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """`total` plus the product of two sums of terms, the small products first.

    `add_product(total, x, y)` adds that of two terms.
    """
    last = max(len(a), len(b)) - 1
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j <= last]
    for i, j in sorted(pairs, key=sum, reverse=True):
        total = add_product(total, a[i], b[j])
    return total


class KeyValueTerms(NamedTuple):
    """K and V of the same tokens as terms."""

    keys: list[jax.Array]
    values: list[jax.Array]


def terms_of_words(
    planes: Sequence[jax.Array], live: jax.Array, layout: AttentionPageLayout
) -> KeyValueTerms:
    """K and V from the words of their planes, of any one shape; V is 0 where `live` is false.

    A weight of 0 would not hide a NaN there.
    """
    if layout.planes == 1:
        words = planes[0]
        halves = (words.astype(jnp.uint16), (jnp.where(live, words, jnp.uint32(0)) >> 16).astype(jnp.uint16))
        return KeyValueTerms(*([lax.bitcast_convert_type(half, jnp.bfloat16)] for half in halves))
    keys, values = float_of(planes[0]), float_of(planes[1])
    return KeyValueTerms(terms_of(keys, FLOAT32_TERMS), terms_of(jnp.where(live, values, 0.0), FLOAT32_TERMS))
