"""Qwen3-Next: https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct. The mathematics and nothing else.

Every layer is x += mixer(norm(x)); x += mlp(norm(x)). Three of four mixers are gated DeltaNet, each fourth
attends to everything: a quarter of each head turns with the position, and a gate for every element scales
what the heads found. MLPs are mixtures of many small experts with one that every token passes.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.specs import KVCacheSpec
from models.attention import NormedAttention, attention_spec
from models.causal_lm import layer_name
from models.gated_delta_net import GatedDeltaNet, Projections, delta_net_spec
from models.headed_lm import HeadedLM
from models.linear import Matrix, linear
from models.mlp import GatedMLP
from models.norms import RMSNorm
from models.paged_cache import CacheStep, PagedCache
from models.qwen3_next_config import Qwen3NextConfig
from models.rope import Rotation, rotation
from models.shared_expert import SharedExpertMLP


def cache_specs(
    config: Qwen3NextConfig, block_size: int, dtype: str, state_dtype: str
) -> dict[str, KVCacheSpec]:
    """What each layer keeps, by layer name, with `block_size` tokens a block and elements of `dtype`, or of
    `state_dtype` where they accumulate."""
    attention = attention_spec(config.attention, block_size, dtype)
    delta_net = delta_net_spec(config.delta_net, block_size, dtype, state_dtype)
    return {layer_name(i): attention if attends else delta_net for i, attends in enumerate(config.attends)}


class Attention(NormedAttention):
    """A head's rows of the query matrix are its query, then its gate."""

    def __init__(self, config: Qwen3NextConfig, index: int, dtype: jnp.dtype):
        super().__init__(
            config.attention,
            index,
            config.hidden_size,
            config.rms_norm_eps,
            dtype,
            query_width=2 * config.attention.head_size,
        )

    def __call__(self, x: jax.Array, turn: Rotation | None, cache: PagedCache) -> CacheStep:
        q_and_gate, k, v = self.project(x)
        q, gate = jnp.split(q_and_gate, 2, axis=-1)
        out, cache = self.attend(q, k, v, turn, cache)
        return self.combine(out * jax.nn.sigmoid(gate)), cache


class DeltaNet(GatedDeltaNet):
    """Rows of the input matrices come by key head: its query, its key, the values and the output gates of its
    value heads; and their beta and decay."""

    def __init__(self, config: Qwen3NextConfig, index: int, dtype: jnp.dtype):
        sizes, hidden = config.delta_net, config.hidden_size
        super().__init__(sizes, index, hidden, config.rms_norm_eps, dtype)
        self.qkv_and_gate = Matrix(jnp.zeros((sizes.conv_channels + sizes.value_size, hidden), dtype))
        self.beta_and_decay = Matrix(jnp.zeros((2 * sizes.num_value_heads, hidden), dtype))

    def project(self, x: jax.Array) -> Projections:
        sizes, tokens = self.sizes, x.shape[0]
        key, values = sizes.key_head_size, sizes.value_size // sizes.num_key_heads
        by_key_head = linear(x, self.qkv_and_gate[...]).reshape(tokens, sizes.num_key_heads, -1)
        q, k, v, gate = jnp.split(by_key_head, [key, 2 * key, 2 * key + values], axis=-1)
        beta_and_decay = linear(x, self.beta_and_decay[...]).reshape(tokens, sizes.num_key_heads, -1)
        beta, decay = jnp.split(beta_and_decay, 2, axis=-1)
        return Projections(
            qkv=jnp.concatenate([part.reshape(tokens, -1) for part in (q, k, v)], axis=-1),
            gate=gate.reshape(tokens, sizes.num_value_heads, -1),
            beta=beta.reshape(tokens, -1),
            decay=decay.reshape(tokens, -1),
        )


class Layer(nnx.Module):
    def __init__(self, config: Qwen3NextConfig, index: int, dtype: jnp.dtype):
        if config.attends[index]:
            self.attention = Attention(config, index, dtype)
        else:
            self.delta_net = DeltaNet(config, index, dtype)
        if config.has_experts[index]:
            self.mlp = SharedExpertMLP(config.experts, config.hidden_size, dtype, is_gated=True)
        else:
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype)
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, x: jax.Array, turn: Rotation, cache: PagedCache) -> CacheStep:
        normed = self.mixer_norm(x)
        if hasattr(self, "attention"):
            mixed, cache = self.attention(normed, turn, cache)
        else:
            mixed, cache = self.delta_net(normed, cache)
        x = x + mixed
        normed = self.mlp_norm(x)
        if isinstance(self.mlp, SharedExpertMLP):
            return x + self.mlp(normed, cache.num_tokens), cache
        return x + self.mlp(normed), cache


class Qwen3NextForCausalLM(HeadedLM):
    """Weights and activations in `dtype`; norms, rotations, states, routing, softmax and logits in
    float32."""

    def __init__(self, config: Qwen3NextConfig, dtype: jnp.dtype):
        eps = config.rms_norm_eps
        super().__init__(config.vocab_size, config.hidden_size, eps, dtype, tied=config.tied)
        self.config = config
        self.layers = nnx.List([Layer(config, i, dtype) for i in range(len(config.attends))])

    def __call__(self, tokens: jax.Array, positions: jax.Array, cache: PagedCache) -> CacheStep:
        x = self.embed(tokens)
        turn = rotation(positions, self.config.turning, self.config.rope.theta)
        for layer in self.layers:
            x, cache = layer(x, turn, cache)
        return self.norm(x), cache
