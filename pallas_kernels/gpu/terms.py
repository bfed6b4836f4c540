"""Numbers as sums of bfloat16 terms, which is what tensor cores multiply.

A bfloat16 is one term. A float32 is three of 8 mantissa bits each; the six largest products of their terms
give the product of two float32 to float32's own precision.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

FLOAT32_TERMS = 3
ONE_TERM = tuple(map(jnp.dtype, ("bfloat16", "float8_e4m3fn", "int8")))


def count_terms(dtype: jax.typing.DTypeLike) -> int:
    """Terms that hold every number of a dtype: one but for wider floats than bfloat16."""
    return 1 if jnp.dtype(dtype) in ONE_TERM else FLOAT32_TERMS


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
