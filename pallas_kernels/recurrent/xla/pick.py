"""Elements by traced indices."""

import jax
from jax import lax


def pick(x: jax.Array, *index: int | jax.Array) -> jax.Array:
    """`x[index]` of the first axes: a slice, which XLA reads where it lies, and not a gather."""
    rest = x.shape[len(index) :]
    begin = (*index, *(0 for _ in rest))
    return lax.dynamic_slice(x, begin, (*(1 for _ in index), *rest)).reshape(rest)
