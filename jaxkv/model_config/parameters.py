"""How many parameters a model has, counted from its configuration.

What is counted: embeddings and output, the matrices of attention, recurrent mixers and MLPs, experts and
routers. Norms, biases, vision towers and draft modules are left out: together under 2 % of the models held
against their published sizes in the tests. A configuration that lacks a size gives no figure but its name.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxkv.errors import JaxkvError
from jaxkv.model_config.layer_caches import AttentionCache, IndexerCache, LatentCache, LayerCache, StateCache
from jaxkv.model_config.mlp_parameters import mlp_parameters
from jaxkv.model_config.model_cache import ModelCache
from jaxkv.model_config.text_config import TextConfig


class Parameters(NamedTuple):
    """embedding: input embeddings and, where they are not tied to it, the output. layers: everything else."""

    embedding: int
    layers: int

    @property
    def total(self) -> int:
        return self.embedding + self.layers


TIED_BY_DEFAULT = frozenset(
    {"cohere2", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma4", "lfm2", "lfm2_moe", "recurrent_gemma"}
)
"""Families whose files omit `tie_word_embeddings` because their class ties input and output."""


def count_parameters(model: ModelCache) -> Parameters:
    """The model's parameters. Raises JaxkvError that names the keys which the configuration lacks."""
    text = model.text
    if text is None:
        raise JaxkvError("layers given by a list say nothing of the weights' sizes")
    embedding = text.integer("vocab_size") * text.integer("hidden_size")
    tied = text.get("tie_word_embeddings")
    if tied is None:
        tied = text.model_type in TIED_BY_DEFAULT or _nested_type(text) in TIED_BY_DEFAULT
    per_layer = text.optional_integer("hidden_size_per_layer_input", at_least=0) or 0
    if per_layer:
        embedding += text.integer("vocab_size_per_layer_input", "vocab_size") * per_layer * len(model.layers)
    mixers = sum(_mixer(text, caches, model) for caches in model.layers)
    if text.model_type == "zamba2":
        mixers -= _shared_blocks_saved(text, model)
    return Parameters(embedding * (1 if tied else 2), mixers + mlp_parameters(text, len(model.layers)))


def _nested_type(text: TextConfig) -> str:
    return text.model_type.removesuffix("_text")


def _mixer(text: TextConfig, caches: tuple[LayerCache, ...], model: ModelCache) -> int:
    """The matrices of one layer's attention and recurrent mixer.

    A layer without a cache of its own that shares an earlier one has attention all the same.
    """
    if not caches and text.optional_integer("num_kv_shared_layers", at_least=0):
        caches = next(earlier for earlier in model.layers if earlier)
    total = 0
    for cache in caches:
        if isinstance(cache, AttentionCache):
            total += _attention(text, cache)
        elif isinstance(cache, LatentCache):
            total += _latent(text)
        elif isinstance(cache, IndexerCache):
            queries = text.integer("index_n_heads") * cache.width
            total += text.integer("q_lora_rank") * queries + text.integer("hidden_size") * cache.width
        else:
            total += _state(text, cache)
    return total


def _attention(text: TextConfig, cache: AttentionCache) -> int:
    hidden = text.integer("hidden_size")
    inputs = 2 * hidden if text.model_type == "zamba2" else hidden
    gated = text.get("attn_output_gate") is True or text.model_type == "qwen3_next"
    queries = cache.num_heads * cache.head_size * (2 if gated else 1)
    keys_and_values = cache.num_kv_heads * (cache.head_size + cache.head_size_v)
    return inputs * (queries + keys_and_values) + cache.num_heads * cache.head_size_v * hidden


def _latent(text: TextConfig) -> int:
    hidden, heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    rank, rope = text.integer("kv_lora_rank"), text.integer("qk_rope_head_dim", at_least=0)
    plain, value = text.integer("qk_nope_head_dim"), text.integer("v_head_dim")
    query_rank = text.optional_integer("q_lora_rank")
    queries = heads * (plain + rope)
    down_up = hidden * query_rank + query_rank * queries if query_rank else hidden * queries
    return down_up + hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden


def _state(text: TextConfig, cache: StateCache) -> int:
    """A recurrent mixer, told apart by the keys that its sizes were read from."""
    hidden = text.integer("hidden_size")
    for key, count in _STATE_PARAMETERS.items():
        if text.get(key) is not None:
            return count(text, cache, hidden)
    return 0


def _channels(cache: StateCache, name: str) -> int:
    return sum(t.split + t.num_groups * t.group_size for t in cache.tensors if t.name == name)


def _gated_delta(text: TextConfig, cache: StateCache, hidden: int) -> int:
    value = text.integer("linear_num_value_heads") * text.integer("linear_value_head_dim")
    gates = 2 * text.integer("linear_num_value_heads")
    return hidden * (_channels(cache, "conv") + value + gates) + value * hidden


def _kimi_delta(text: TextConfig, cache: StateCache, hidden: int) -> int:
    # q, k, v and output; decay and output gates of low rank (head size), or of full rank where it says so.
    inner = _channels(cache, "conv") // 3
    size = cache.tensors[1].fixed[0]
    part = text.get("linear_attn_config") or {}
    gate = hidden * inner if part.get("use_full_rank_gate") else size * (hidden + inner)
    return 4 * hidden * inner + size * (hidden + inner) + gate


def _mamba1(text: TextConfig, cache: StateCache, hidden: int) -> int:
    channels, rank = cache.tensors[0].split, text.integer("mamba_dt_rank")
    return channels * (3 * hidden + 2 * rank + 3 * text.integer("mamba_d_state"))


def _mamba2(text: TextConfig, cache: StateCache, hidden: int) -> int:
    conv, state = cache.tensors
    inner = conv.split
    return hidden * (2 * inner + conv.num_groups * conv.group_size + state.split) + inner * hidden


def _lightning(text: TextConfig, cache: StateCache, hidden: int) -> int:
    return 5 * hidden * cache.tensors[0].split * cache.tensors[0].fixed[0]


def _short_conv(text: TextConfig, cache: StateCache, hidden: int) -> int:
    return 4 * hidden * hidden


def _rg_lru(text: TextConfig, cache: StateCache, hidden: int) -> int:
    width = cache.tensors[1].split
    return 3 * hidden * width + 2 * width * width // text.integer("num_attention_heads")


_STATE_PARAMETERS: dict[str, Callable[[TextConfig, StateCache, int], int]] = {
    "linear_num_value_heads": _gated_delta,
    "linear_attn_config": _kimi_delta,
    "linear_num_heads": _kimi_delta,
    "mamba_dt_rank": _mamba1,
    "attn_type_list": _lightning,
    "conv_L_cache": _short_conv,
    "lru_width": _rg_lru,
    "mamba_d_state": _mamba2,
    "ssm_state_size": _mamba2,
    "state_size": _mamba2,
}
"""By a key that only files with this mixer have."""


def _shared_blocks_saved(text: TextConfig, model: ModelCache) -> int:
    """Zamba2's hybrid layers take turns with `num_mem_blocks` sets of attention weights."""
    attention = [c for caches in model.layers for c in caches if isinstance(c, AttentionCache)]
    return (len(attention) - text.integer("num_mem_blocks")) * _attention(text, attention[0])
