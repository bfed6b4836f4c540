"""How much of a state is left between the tokens of a chunk."""

import jax
import jax.numpy as jnp
from jax import lax


def decays_between(logs: jax.Array) -> jax.Array:
    """`[..., L, L]`: exp of the sum of `logs [..., L]` after token j up to token i, 0 for j after i.

    Each sum is taken by itself. As differences of running sums, those after a strong decay would have its
    rounding error.
    """
    length = logs.shape[-1]
    after = jnp.tril(jnp.ones((length, length), bool), -1)
    up_to = jnp.tril(jnp.ones((length, length), logs.dtype))
    sums = jnp.einsum(
        "im,...mj->...ij", up_to, jnp.where(after, logs[..., None], 0), precision=lax.Precision.HIGHEST
    )
    return jnp.where(up_to > 0, jnp.exp(sums), 0)
