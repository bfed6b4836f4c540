"""The gated MLP of most models: down(activation(gate(x)) * up(x))."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from models.linear import Matrix, linear


class GatedMLP(nnx.Module):
    """Weights in `dtype`: gate_up[2 * inner_size, hidden_size], gate first, and
    down[hidden_size, inner_size]."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        dtype: jnp.dtype,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    ):
        self.activation = activation
        self.gate_up = Matrix(jnp.zeros((2 * inner_size, hidden_size), dtype))
        self.down = Matrix(jnp.zeros((hidden_size, inner_size), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(linear(x, self.gate_up[...]), 2, axis=-1)
        return linear(self.activation(gate) * up, self.down[...])
