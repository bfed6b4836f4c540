"""Gated DeltaNet: https://arxiv.org/abs/2412.06464, as Qwen3-Next introduced it to language models.

Queries, keys and values pass one causal convolution; a matrix for each value head then decays and is
corrected with every token; what it answers is normed and gated.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.specs import MambaSpec
from models.causal_lm import layer_name
from models.linear import Matrix, linear
from models.norms import RMSNorm
from models.paged_cache import CacheStep, PagedCache
from models.sizes import DeltaNetSizes

L2_NORM_EPS = 1e-6


class Projections(NamedTuple):
    """What a family makes of x[T, hidden_size].

    qkv[T, conv_channels]: all queries, then keys, then values, before the convolution.
    gate[T, Hv, dv]: of the output. beta, decay[T, Hv]: before sigmoid and softplus.
    """

    qkv: jax.Array
    gate: jax.Array
    beta: jax.Array
    decay: jax.Array


def delta_net_spec(sizes: DeltaNetSizes, block_size: int, dtype: str, state_dtype: str) -> MambaSpec:
    """What a layer keeps: the last inputs of the convolution in `dtype` and the heads' matrices, which
    accumulate, in `state_dtype`."""
    return MambaSpec(
        block_size=block_size,
        shapes=(
            (sizes.conv_channels, sizes.conv_kernel - 1),
            (sizes.num_value_heads, sizes.value_head_size, sizes.key_head_size),
        ),
        dtypes=(dtype, state_dtype),
    )


class GatedDeltaNet(nnx.Module):
    """The layer but for its input matrices, which families lay out in ways of their own."""

    def __init__(self, sizes: DeltaNetSizes, index: int, hidden_size: int, eps: float, dtype: jnp.dtype):
        self.sizes, self.index = sizes, index
        self.conv = nnx.Param(jnp.zeros((sizes.conv_channels, sizes.conv_kernel), dtype))
        self.decay_bias = nnx.Param(jnp.zeros((sizes.num_value_heads,), jnp.float32))
        self.log_decay = nnx.Param(jnp.zeros((sizes.num_value_heads,), jnp.float32))
        self.norm = RMSNorm(sizes.value_head_size, eps)
        self.output = Matrix(jnp.zeros((hidden_size, sizes.value_size), dtype))

    def project(self, x: jax.Array) -> Projections:
        """The input matrices."""
        raise NotImplementedError

    def __call__(self, x: jax.Array, cache: PagedCache) -> CacheStep:
        sizes = self.sizes
        qkv, gate, beta, decay = self.project(x)
        step = jax.nn.softplus(decay.astype(jnp.float32) + self.decay_bias[...])
        out, cache = cache.conv_delta_rule(
            layer_name(self.index),
            qkv,
            self.conv[...],
            -jnp.exp(self.log_decay[...]) * step,
            jax.nn.sigmoid(beta.astype(jnp.float32)),
            scale=sizes.key_head_size**-0.5,
            l2norm_eps=L2_NORM_EPS,
            activation="silu",
        )
        gated = self.norm.in_float32(out) * jax.nn.silu(gate.astype(jnp.float32))
        return linear(gated.astype(x.dtype).reshape(x.shape[0], -1), self.output[...]), cache
