"""Elements by traced indices, which are never negative: nothing is spent on those that were."""

import jax
from jax import lax


def pick(x: jax.Array, *index: int | jax.Array) -> jax.Array:
    """`x[index]` of the first axes: a slice, which XLA reads where it lies, and not a gather."""
    rest = x.shape[len(index) :]
    begin = (*index, *(0 for _ in rest))
    sizes = (*(1 for _ in index), *rest)
    return lax.dynamic_slice(x, begin, sizes, allow_negative_indices=False).reshape(rest)


def put(x: jax.Array, value: jax.Array, *index: int | jax.Array) -> jax.Array:
    """`x` with `value` as `x[index]` of the first axes."""
    begin = (*index, *(0 for _ in value.shape))
    whole = value.reshape((1,) * len(index) + value.shape)
    return lax.dynamic_update_slice(x, whole, begin, allow_negative_indices=False)
