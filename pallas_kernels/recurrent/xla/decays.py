"""How much of a state is left between the tokens of a chunk."""

import jax
import jax.numpy as jnp
from jax import lax


def decays_between(logs: jax.Array) -> jax.Array:
    """`[H, L, L]`: exp of the sum of `logs [H, L]` after token j up to token i, 0 for j after i.

    Each sum is taken by itself, row i from row i - 1. As differences of running sums, those after a strong
    decay would have its rounding error.
    """
    length = logs.shape[1]
    column = jnp.arange(length)

    def next_row(row: jax.Array, token: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, log = token
        row = jnp.where(column < index, row + log[:, None], 0)
        return row, row

    _, rows = lax.scan(next_row, jnp.zeros_like(logs), (column, logs.T))
    sums = rows.transpose(1, 0, 2)
    return jnp.where(column[:, None] >= column, jnp.exp(sums), 0)
