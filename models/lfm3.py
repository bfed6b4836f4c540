"""LFM3: https://huggingface.co/LiquidAI/LFM3-1.7B. The mathematics and nothing else.

Every layer is x += norm(mixer(norm(x))); x += norm(mlp(norm(x))). Every second mixer is a short convolution
between two gates; the others attend to a window or to everything, with a gate for every head. Where they
attend to everything, only the faster half of the angles turns with the position.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.specs import KVCacheSpec, MambaSpec
from models.attention import NormedAttention, attention_spec
from models.causal_lm import layer_name
from models.headed_lm import HeadedLM
from models.lfm3_config import Lfm3Config
from models.linear import Matrix, linear
from models.mlp import GatedMLP
from models.norms import RMSNorm
from models.paged_cache import CacheStep, PagedCache
from models.rope import Rotation, rotation


def cache_specs(config: Lfm3Config, block_size: int, dtype: str, state_dtype: str) -> dict[str, KVCacheSpec]:
    """What each layer keeps, by layer name, with `block_size` tokens a block and elements of `dtype`; no
    state accumulates, so that none is of `state_dtype`."""
    by_type = {
        "conv": MambaSpec(
            block_size=block_size, shapes=((config.hidden_size, config.conv_kernel - 1),), dtypes=(dtype,)
        ),
        "sliding_attention": attention_spec(config.attention, block_size, dtype, config.sliding_window),
        "full_attention": attention_spec(config.attention, block_size, dtype),
    }
    return {layer_name(i): by_type[kind] for i, kind in enumerate(config.layer_types)}


class Attention(NormedAttention):
    def __init__(self, config: Lfm3Config, index: int, dtype: jnp.dtype):
        is_sliding = config.layer_types[index] == "sliding_attention"
        super().__init__(
            config.attention,
            index,
            config.hidden_size,
            config.rms_norm_eps,
            dtype,
            sliding_window=config.sliding_window if is_sliding else None,
        )
        gate = jnp.zeros((config.attention.num_heads, config.hidden_size), dtype)
        self.gate = Matrix(gate) if config.has_attention_gate else None

    def __call__(self, x: jax.Array, turn: Rotation | None, cache: PagedCache) -> CacheStep:
        out, cache = self.attend(*self.project(x), turn, cache)
        if self.gate is not None:
            out = out * jax.nn.sigmoid(linear(x, self.gate[...]))[..., None]
        return self.combine(out), cache


class ShortConv(nnx.Module):
    def __init__(self, config: Lfm3Config, index: int, dtype: jnp.dtype):
        hidden = config.hidden_size
        self.index = index
        self.input = Matrix(jnp.zeros((3 * hidden, hidden), dtype))
        self.kernel = nnx.Param(jnp.zeros((hidden, config.conv_kernel), dtype))
        self.output = Matrix(jnp.zeros((hidden, hidden), dtype))

    def __call__(self, x: jax.Array, cache: PagedCache) -> CacheStep:
        before, after, inner = jnp.split(linear(x, self.input[...]), 3, axis=-1)
        out, cache = cache.causal_conv1d(layer_name(self.index), before * inner, self.kernel[...])
        return linear(after * out, self.output[...]), cache


class Layer(nnx.Module):
    def __init__(self, config: Lfm3Config, index: int, dtype: jnp.dtype):
        if config.layer_types[index] == "conv":
            self.conv = ShortConv(config, index, dtype)
        else:
            self.attention = Attention(config, index, dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype)
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer_output_norm = _output_norm(config)
        self.mlp_output_norm = _output_norm(config)

    def __call__(self, x: jax.Array, turn: Rotation | None, cache: PagedCache) -> CacheStep:
        normed = self.mixer_norm(x)
        if hasattr(self, "attention"):
            mixed, cache = self.attention(normed, turn, cache)
        else:
            mixed, cache = self.conv(normed, cache)
        x = x + (mixed if self.mixer_output_norm is None else self.mixer_output_norm(mixed))
        out = self.mlp(self.mlp_norm(x))
        return x + (out if self.mlp_output_norm is None else self.mlp_output_norm(out)), cache


def _output_norm(config: Lfm3Config) -> RMSNorm | None:
    return RMSNorm(config.hidden_size, config.rms_norm_eps) if config.has_output_norms else None


class Lfm3ForCausalLM(HeadedLM):
    """Weights and activations in `dtype`; norms, rotations, convolutions, softmax and logits in float32."""

    def __init__(self, config: Lfm3Config, dtype: jnp.dtype):
        eps = config.rms_norm_eps
        super().__init__(config.vocab_size, config.hidden_size, eps, dtype, tied=config.tied)
        self.config = config
        self.layers = nnx.List([Layer(config, i, dtype) for i in range(len(config.layer_types))])

    def __call__(self, tokens: jax.Array, positions: jax.Array, cache: PagedCache) -> CacheStep:
        config, x = self.config, self.embed(tokens)
        head_size, sliding, full = config.attention.head_size, config.sliding_rope, config.full_rope
        turns = {
            "sliding_attention": rotation(positions, head_size, sliding.theta, fraction=sliding.fraction),
            "full_attention": rotation(positions, head_size, full.theta, fraction=full.fraction),
        }
        for layer, kind in zip(self.layers, config.layer_types, strict=True):
            x, cache = layer(x, turns.get(kind), cache)
        return self.norm(x), cache
