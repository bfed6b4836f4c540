"""Lara-mini: https://huggingface.co/translated/Lara-4-Mini-Base. The mathematics and nothing else.

Every layer is x += mixer(norm(x)); x += mlp(norm(x)). Mixers are gated DeltaNet, attention to a window, which
knows positions, and attention to everything, which does not. MLPs are mixtures of experts with one that every
token passes.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.specs import KVCacheSpec
from models.attention import NormedAttention, attention_spec
from models.causal_lm import layer_name
from models.gated_delta_net import GatedDeltaNet, Projections, delta_net_spec
from models.headed_lm import HeadedLM
from models.lara_mini_config import LaraMiniConfig
from models.linear import Matrix, linear
from models.norms import RMSNorm
from models.paged_cache import CacheStep, PagedCache
from models.rope import Rotation, rotation
from models.shared_expert import SharedExpertMLP


def cache_specs(
    config: LaraMiniConfig, block_size: int, dtype: str, state_dtype: str
) -> dict[str, KVCacheSpec]:
    """What each layer keeps, by layer name, with `block_size` tokens a block and elements of `dtype`, or of
    `state_dtype` where they accumulate."""
    by_type = {
        "linear_attention": delta_net_spec(config.delta_net, block_size, dtype, state_dtype),
        "sliding_attention": attention_spec(config.attention, block_size, dtype, config.sliding_window),
        "full_attention": attention_spec(config.attention, block_size, dtype),
    }
    return {layer_name(i): by_type[kind] for i, kind in enumerate(config.layer_types)}


class DeltaNet(GatedDeltaNet):
    """Rows of the input matrix are queries, keys, values, output gates, betas and decays."""

    def __init__(self, config: LaraMiniConfig, index: int, dtype: jnp.dtype):
        sizes, hidden = config.delta_net, config.hidden_size
        super().__init__(sizes, index, hidden, config.rms_norm_eps, dtype)
        rows = sizes.conv_channels + sizes.value_size + 2 * sizes.num_value_heads
        self.input = Matrix(jnp.zeros((rows, hidden), dtype))

    def project(self, x: jax.Array) -> Projections:
        sizes = self.sizes
        gates, betas = sizes.conv_channels, sizes.conv_channels + sizes.value_size
        qkv, gate, beta, decay = jnp.split(
            linear(x, self.input[...]), [gates, betas, betas + sizes.num_value_heads], axis=-1
        )
        return Projections(qkv, gate.reshape(x.shape[0], sizes.num_value_heads, -1), beta, decay)


class Layer(nnx.Module):
    def __init__(self, config: LaraMiniConfig, index: int, dtype: jnp.dtype):
        kind = config.layer_types[index]
        self.is_sliding = kind == "sliding_attention"
        if kind == "linear_attention":
            self.delta_net = DeltaNet(config, index, dtype)
        else:
            self.attention = NormedAttention(
                config.attention,
                index,
                config.hidden_size,
                config.rms_norm_eps,
                dtype,
                sliding_window=config.sliding_window if self.is_sliding else None,
            )
        self.mlp = SharedExpertMLP(config.experts, config.hidden_size, dtype, is_gated=False)
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, x: jax.Array, turn: Rotation, cache: PagedCache) -> CacheStep:
        normed = self.mixer_norm(x)
        if hasattr(self, "attention"):
            mixed, cache = self.attention(normed, turn if self.is_sliding else None, cache)
        else:
            mixed, cache = self.delta_net(normed, cache)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x), cache.num_tokens), cache


class LaraMiniForCausalLM(HeadedLM):
    """Weights and activations in `dtype`; norms, rotations, states, routing, softmax and logits in
    float32."""

    def __init__(self, config: LaraMiniConfig, dtype: jnp.dtype):
        eps = config.rms_norm_eps
        super().__init__(config.vocab_size, config.hidden_size, eps, dtype, tied=config.tied)
        self.config = config
        self.layers = nnx.List([Layer(config, i, dtype) for i in range(len(config.layer_types))])

    def __call__(self, tokens: jax.Array, positions: jax.Array, cache: PagedCache) -> CacheStep:
        x = self.embed(tokens)
        turn = rotation(positions, self.config.attention.head_size, self.config.rope.theta)
        for layer in self.layers:
            x, cache = layer(x, turn, cache)
        return self.norm(x), cache
