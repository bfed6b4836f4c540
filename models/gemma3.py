"""Gemma 3, text only: https://arxiv.org/abs/2503.19786. The mathematics and nothing else.

Every layer is x += norm(attention(norm(x))); x += norm(mlp(norm(x))). Five of six layers attend to a window,
with rotary embeddings of base 10,000; each sixth attends to everything, with base 1,000,000.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.specs import KVCacheSpec
from models.attention import NormedAttention, attention_spec
from models.causal_lm import CausalLM, layer_name
from models.gemma3_config import Gemma3Config
from models.linear import VocabularyMatrix, look_up, vocabulary_logits
from models.mlp import GatedMLP
from models.norms import RMSNorm
from models.paged_cache import PagedCache
from models.rope import Rotation, rotation


def cache_specs(
    config: Gemma3Config, block_size: int, dtype: str, state_dtype: str
) -> dict[str, KVCacheSpec]:
    """What each layer keeps, by layer name, with `block_size` tokens a block and elements of `dtype`; none
    has a state of `state_dtype`."""
    full = attention_spec(config.attention, block_size, dtype)
    window = attention_spec(config.attention, block_size, dtype, config.sliding_window)
    return {layer_name(i): window if config.is_sliding[i] else full for i in range(config.num_layers)}


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


class Layer(nnx.Module):
    def __init__(self, config: Gemma3Config, index: int, dtype: jnp.dtype):
        self.attention = NormedAttention(
            config.attention,
            index,
            config.hidden_size,
            config.rms_norm_eps,
            dtype,
            scale=config.query_pre_attn_scalar**-0.5,
            sliding_window=config.sliding_window if config.is_sliding[index] else None,
            softcap=config.attn_logit_softcap,
        )
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype, _gelu)
        self.pre_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, x: jax.Array, turn: Rotation, cache: PagedCache) -> tuple[jax.Array, PagedCache]:
        attended, cache = self.attention(self.pre_attention_norm(x), turn, cache)
        x = x + self.post_attention_norm(attended)
        return x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x))), cache


class Gemma3ForCausalLM(CausalLM):
    """Weights and activations in `dtype`; norms, rotations, softmax and logits in float32."""

    def __init__(self, config: Gemma3Config, dtype: jnp.dtype):
        self.config, self.dtype = config, dtype
        self.embedding = VocabularyMatrix(jnp.zeros((config.vocab_size, config.hidden_size), dtype))
        self.layers = nnx.List([Layer(config, i, dtype) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, cache: PagedCache
    ) -> tuple[jax.Array, PagedCache]:
        config = self.config
        embed_scale = jnp.asarray(math.sqrt(config.hidden_size), self.dtype)
        x = look_up(self.embedding[...], tokens) * embed_scale
        local = rotation(positions, config.attention.head_size, config.rope_local_theta)
        everywhere = rotation(
            positions, config.attention.head_size, config.rope_theta, config.rope_scaling_factor
        )
        for layer, is_sliding in zip(self.layers, config.is_sliding, strict=True):
            x, cache = layer(x, local if is_sliding else everywhere, cache)
        return self.norm(x), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        scores = vocabulary_logits(hidden, self.embedding[...])
        cap = self.config.final_logit_softcap
        return scores if cap is None else jnp.tanh(scores / cap) * cap
