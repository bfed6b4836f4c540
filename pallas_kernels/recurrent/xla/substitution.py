"""Unit lower triangular systems, row after row."""

import jax
import jax.numpy as jnp
from jax import lax

UNROLL = 8


def solve_unit_lower(lower: jax.Array, right: jax.Array) -> jax.Array:
    """X `[H, L, V]` with `(I + A) X = right`, A `lower [H, L, L]` strictly lower triangular.

    Loops without a matrix product become one function for XLA on a CPU: a turn costs next to nothing and a
    row stays in the nearest cache, so this is cheaper than an inverse made of many small products.
    """
    heads, length, width = right.shape
    turn = UNROLL if length % UNROLL == 0 else 1
    lower = lower.reshape(heads, length, length // turn, turn)

    def row(index: jax.Array, found: jax.Array) -> jax.Array:
        head, i = index // length, index % length

        def some(block: jax.Array, rest: jax.Array) -> jax.Array:
            factors = lax.dynamic_slice(lower, (head, i, block, 0), (1, 1, 1, turn)).reshape(turn)
            known = lax.dynamic_slice(found, (head, block * turn, 0), (1, turn, width))[0]
            return rest - sum(factors[j] * known[j] for j in range(turn))

        # Rows from i on are not found yet, but their factors are 0.
        rest = lax.dynamic_slice(found, (head, i, 0), (1, 1, width)).reshape(width)
        rest = lax.fori_loop(0, (i + turn - 1) // turn, some, rest)
        return lax.dynamic_update_slice(found, rest[None, None], (head, i, 0))

    return lax.fori_loop(0, heads * length, row, right.astype(jnp.float32))
