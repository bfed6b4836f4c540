"""Root mean square norms (https://arxiv.org/abs/1910.07467), in float32, rounded once to the input's
dtype."""

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis. Where a model is published with weights w for a factor 1 + w,
    `scale` is 1 + w."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.in_float32(x).astype(x.dtype)

    def in_float32(self, x: jax.Array) -> jax.Array:
        """The same, not rounded."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return wide * jax.lax.rsqrt(mean_square + self.eps) * self.scale[...]
