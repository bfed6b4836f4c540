"""A mixture of experts beside one expert that every token passes."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.linear import Matrix, linear
from models.mlp import GatedMLP
from models.moe import Experts, route
from models.sizes import ExpertSizes


class SharedExpertMLP(nnx.Module):
    """Weights in `dtype`; routing in float32.

    is_gated: the shared expert's output is multiplied by the sigmoid of one more number made from the token.
    """

    def __init__(self, sizes: ExpertSizes, hidden_size: int, dtype: jnp.dtype, *, is_gated: bool):
        self.sizes = sizes
        self.router = Matrix(jnp.zeros((sizes.num_experts, hidden_size), dtype))
        self.experts = Experts(sizes.num_experts, hidden_size, sizes.inner_size, dtype)
        self.shared = GatedMLP(hidden_size, sizes.shared_size, dtype)
        self.shared_gate = Matrix(jnp.zeros((1, hidden_size), dtype)) if is_gated else None

    def __call__(self, x: jax.Array, num_tokens: jax.Array) -> jax.Array:
        """[T, hidden_size] from x; zeros of the experts for the padding tokens from `num_tokens` on."""
        logits = linear(x.astype(jnp.float32), self.router[...].astype(jnp.float32))
        routing = route(logits, self.sizes.experts_per_token, renormalise=self.sizes.renormalise)
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * jax.nn.sigmoid(linear(x, self.shared_gate[...]))
        return self.experts(x, routing, num_tokens) + shared
