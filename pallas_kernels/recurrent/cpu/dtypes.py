"""The types of inputs that kernels read."""

import jax
import jax.numpy as jnp


def readable(x: jax.Array) -> jax.Array:
    """Inputs in bfloat16 as they are, any others in float32."""
    return x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)
