"""Jamba: https://arxiv.org/abs/2403.19887. The mathematics and nothing else.

Every layer is x += mixer(norm(x)); x += mlp(norm(x)). One layer in eight attends, without positions; the
others are Mamba 1 (https://arxiv.org/abs/2312.00752) with norms on the time step, B and C. Every second MLP
is a mixture of experts.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.specs import FullAttentionSpec, KVCacheSpec, MambaSpec
from models.causal_lm import layer_name
from models.headed_lm import HeadedLM
from models.jamba_config import JambaConfig
from models.linear import Matrix, linear
from models.mlp import GatedMLP
from models.moe import Experts, route
from models.norms import RMSNorm
from models.paged_cache import PagedCache


def cache_specs(config: JambaConfig, block_size: int, dtype: str, state_dtype: str) -> dict[str, KVCacheSpec]:
    """What each layer keeps, by layer name: `block_size` tokens of `dtype` a block, or the last inputs of the
    convolution in `dtype` and the state, which accumulates, in `state_dtype`.
    """
    attention = FullAttentionSpec(
        block_size=block_size, num_kv_heads=config.num_kv_heads, head_size=config.head_size, dtype=dtype
    )
    mamba = MambaSpec(
        block_size=block_size,
        shapes=((config.channels, config.conv_kernel - 1), (config.channels, config.state_size)),
        dtypes=(dtype, state_dtype),
    )
    return {layer_name(i): attention if attends else mamba for i, attends in enumerate(config.attends)}


class Attention(nnx.Module):
    def __init__(self, config: JambaConfig, index: int, dtype: jnp.dtype):
        self.config, self.index = config, index
        kv_size = config.num_kv_heads * config.head_size
        self.qkv = Matrix(jnp.zeros((config.hidden_size + 2 * kv_size, config.hidden_size), dtype))
        self.output = Matrix(jnp.zeros((config.hidden_size, config.hidden_size), dtype))

    def __call__(self, x: jax.Array, cache: PagedCache) -> tuple[jax.Array, PagedCache]:
        config = self.config
        heads = linear(x, self.qkv[...]).reshape(x.shape[0], -1, config.head_size)
        q, k, v = jnp.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=1)
        out, cache = cache.attend(layer_name(self.index), q, k, v, scale=config.head_size**-0.5)
        return linear(out.reshape(x.shape[0], -1), self.output[...]), cache


class Mamba(nnx.Module):
    """Time steps, decay and scan in float32."""

    def __init__(self, config: JambaConfig, index: int, dtype: jnp.dtype):
        self.config, self.index = config, index
        hidden, channels, rank, size = (
            config.hidden_size,
            config.channels,
            config.time_rank,
            config.state_size,
        )
        self.input = Matrix(jnp.zeros((2 * channels, hidden), dtype))
        self.conv = nnx.Param(jnp.zeros((channels, config.conv_kernel), dtype))
        self.conv_bias = nnx.Param(jnp.zeros((channels,), dtype))
        self.selection = Matrix(jnp.zeros((rank + 2 * size, channels), dtype))
        self.time = Matrix(jnp.zeros((channels, rank), dtype))
        self.time_bias = nnx.Param(jnp.zeros((channels,), jnp.float32))
        self.time_norm = RMSNorm(rank, config.rms_norm_eps)
        self.b_norm = RMSNorm(size, config.rms_norm_eps)
        self.c_norm = RMSNorm(size, config.rms_norm_eps)
        self.log_decay = nnx.Param(jnp.zeros((channels, size), jnp.float32))
        self.skip = nnx.Param(jnp.zeros((channels,), jnp.float32))
        self.output = Matrix(jnp.zeros((hidden, channels), dtype))

    def __call__(self, x: jax.Array, cache: PagedCache) -> tuple[jax.Array, PagedCache]:
        config, name = self.config, layer_name(self.index)
        inner, gate = jnp.split(linear(x, self.input[...]), 2, axis=-1)
        inner, cache = cache.causal_conv1d(
            name, inner, self.conv[...], self.conv_bias[...], activation="silu"
        )
        selected = linear(inner, self.selection[...])
        time, b, c = jnp.split(selected, [config.time_rank, config.time_rank + config.state_size], axis=-1)
        time = linear(self.time_norm(time), self.time[...]).astype(jnp.float32)
        out, cache = cache.selective_scan(
            name,
            inner,
            jax.nn.softplus(time + self.time_bias[...]),
            -jnp.exp(self.log_decay[...]),
            self.b_norm(b),
            self.c_norm(c),
            self.skip[...],
        )
        return linear(out * jax.nn.silu(gate), self.output[...]), cache


class ExpertsMLP(nnx.Module):
    """The weights of the chosen experts are their softmax over all experts; they do not sum to 1."""

    def __init__(self, config: JambaConfig, dtype: jnp.dtype):
        self.experts_per_token = config.experts_per_token
        self.router = Matrix(jnp.zeros((config.num_experts, config.hidden_size), dtype))
        self.experts = Experts(config.num_experts, config.hidden_size, config.intermediate_size, dtype)

    def __call__(self, x: jax.Array, num_tokens: jax.Array) -> jax.Array:
        routing = route(linear(x, self.router[...]), self.experts_per_token, renormalise=False)
        return self.experts(x, routing, num_tokens)


class Layer(nnx.Module):
    def __init__(self, config: JambaConfig, index: int, dtype: jnp.dtype):
        if config.attends[index]:
            self.attention = Attention(config, index, dtype)
        else:
            self.mamba = Mamba(config, index, dtype)
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.has_experts[index]:
            self.mlp = ExpertsMLP(config, dtype)
        else:
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype)

    def __call__(self, x: jax.Array, cache: PagedCache) -> tuple[jax.Array, PagedCache]:
        mixer = self.attention if hasattr(self, "attention") else self.mamba
        mixed, cache = mixer(self.mixer_norm(x), cache)
        x = x + mixed
        normed = self.mlp_norm(x)
        if isinstance(self.mlp, ExpertsMLP):
            return x + self.mlp(normed, cache.num_tokens), cache
        return x + self.mlp(normed), cache


class JambaForCausalLM(HeadedLM):
    """Weights and activations in `dtype`; norms, states, routing, softmax and logits in float32."""

    def __init__(self, config: JambaConfig, dtype: jnp.dtype):
        super().__init__(config.vocab_size, config.hidden_size, config.rms_norm_eps, dtype, tied=config.tied)
        self.layers = nnx.List([Layer(config, i, dtype) for i in range(len(config.attends))])

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, cache: PagedCache
    ) -> tuple[jax.Array, PagedCache]:
        x = self.embed(tokens)
        for layer in self.layers:
            x, cache = layer(x, cache)
        return self.norm(x), cache
