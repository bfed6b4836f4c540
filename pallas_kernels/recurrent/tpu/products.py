"""Matrix products of float32 in one go: bfloat16 terms side by side along the axis that is summed over.

A float32 is three bfloat16 terms of 8 mantissa bits each. A matrix unit sums over 128 or 256 at a time, and
the axes here are 64 and 128 long: the products of terms that matter, six for three terms each and three for
two, fill it together, where one after the other each would leave half or more of it idle.
"""

import jax
import jax.numpy as jnp
from jax import lax

FLOAT32_TERMS = 3
BFLOAT16_TERMS = 2
"""Where inputs are bfloat16: what products lose, 2^-16, is far below what the inputs have lost already."""

Terms = tuple[jax.Array, ...]


def terms_of(x: jax.Array, count: int) -> Terms:
    """float32 `x` as a sum of `count` bfloat16 terms, the largest first."""
    terms = [x.astype(jnp.bfloat16)]
    for _ in range(count - 1):
        x = x - terms[-1].astype(jnp.float32)
        terms.append(x.astype(jnp.bfloat16))
    return tuple(terms)


def product(a: Terms, b: Terms, a_axis: int, b_axis: int) -> jax.Array:
    """The matrix product over one axis of each, float32, without the products of two small terms."""
    most = max(len(a), len(b))
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < most]
    return lax.dot_general(
        jnp.concatenate([a[i] for i, _ in pairs], axis=a_axis),
        jnp.concatenate([b[j] for _, j in pairs], axis=b_axis),
        (((a_axis,), (b_axis,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
