"""How each family of models spells its layers: one table row a family."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxkv.errors import JaxkvError
from jaxkv.model_config import states
from jaxkv.model_config.attention import (
    KINDS,
    AttentionReader,
    baichuan_m1,
    gemma4,
    grouped_query,
    latent,
    sliding_heads_of_their_own,
    zamba2,
)
from jaxkv.model_config.layer_caches import AttentionCache, IndexerCache, LayerCache, StateCache
from jaxkv.model_config.layer_patterns import (
    BOTH,
    CHUNKED,
    FULL,
    NONE,
    PATTERN_KEYS,
    RECURRENT,
    SLIDING,
    Pattern,
    all_sliding_if_windowed,
    every_layer,
    every_nth_full,
    layer_words,
    samba_then_shared,
    upper_layers_slide,
)
from jaxkv.model_config.states import StateReader
from jaxkv.model_config.text_config import TextConfig

STATE = "state"
"""In the tables below: the layer keeps a recurrent state."""

Extra = Callable[[TextConfig, list[list[LayerCache]]], list[list[LayerCache]]]
"""Changes what the layers keep where a family does something of its own."""

WORDS: dict[str, tuple[str, ...]] = {
    FULL: (FULL,),
    "attention": (FULL,),
    SLIDING: (SLIDING,),
    CHUNKED: (CHUNKED,),
    RECURRENT: (STATE,),
    "mamba": (STATE,),
    "conv": (STATE,),
    "recurrent": (STATE,),
    NONE: (),
}
"""The caches that each word of a pattern stands for, unless the family says otherwise."""


class Family(NamedTuple):
    """when_silent: the layers' words where the file has no key that states them; None: it always has.
    attention, state: the readers of sizes.
    words: what words stand for in this family, where it differs from WORDS.
    state_dtype: of the recurrent part, where it is not the model's own (vLLM's choice for the family).
    defaults: keys that the family's files omit where they equal these values.
    extra: what the family's layers do beyond that.
    """

    when_silent: Pattern | None = None
    attention: AttentionReader = grouped_query
    state: StateReader | None = None
    words: Mapping[str, tuple[str, ...]] = {}
    state_dtype: str | None = None
    defaults: Mapping[str, Any] = {}
    extra: Extra | None = None

    def layers(self, config: TextConfig) -> list[list[LayerCache]]:
        """What each layer keeps, in the model's order. Raises JaxkvError for unknown words."""
        words = {**WORDS, **self.words}
        result: list[list[LayerCache]] = []
        for word in layer_words(config, self.when_silent):
            if word not in words:
                raise JaxkvError(f"the layer pattern has {word!r}; known are {', '.join(words)}")
            result.append([self._cache(config, part) for part in words[word]])
        return self.extra(config, result) if self.extra else result

    def _cache(self, config: TextConfig, part: str) -> LayerCache:
        if part != STATE:
            return self.attention(config, KINDS[part])
        if self.state is None:
            raise JaxkvError("the layer pattern has recurrent layers, which this model_type has none of")
        return self.state(config)


def _shared_tail(config: TextConfig, layers: list[list[LayerCache]]) -> list[list[LayerCache]]:
    """The last `num_kv_shared_layers` layers read the caches of earlier ones."""
    own = len(layers) - (config.optional_integer("num_kv_shared_layers", at_least=0) or 0)
    if own < 1:
        raise JaxkvError(
            f"num_kv_shared_layers leaves none of num_hidden_layers = {len(layers)} layers a cache"
        )
    return [*layers[:own], *([] for _ in layers[own:])]


def _indexers(config: TextConfig, layers: list[list[LayerCache]]) -> list[list[LayerCache]]:
    """Every layer has an indexer, or those that `indexer_types` calls "full"."""
    types = config.get("indexer_types") or ["full"] * len(layers)
    if not isinstance(types, list) or len(types) != len(layers):
        raise JaxkvError(f"indexer_types has {len(types)} entries, num_hidden_layers is {len(layers)}")
    indexer = IndexerCache(width=config.integer("index_head_dim"))
    return [
        [*caches, indexer] if kind == "full" else caches for caches, kind in zip(layers, types, strict=True)
    ]


def _key_value_convs(config: TextConfig, layers: list[list[LayerCache]]) -> list[list[LayerCache]]:
    """Every attention layer also keeps the inputs of its convolution over keys and values."""
    window = config.integer("conv_window", at_least=2)

    def state(cache: LayerCache) -> StateCache:
        assert isinstance(cache, AttentionCache)  # baichuan_m1 reads nothing else
        return states.key_value_conv(cache.num_kv_heads, cache.head_size, window)

    return [[cache, state(cache)] for [cache] in layers]


# Class defaults of transformers' Gemma3TextConfig, omitted by the hub files of the 4B, 12B and 27B models.
_GEMMA3 = Family(
    every_nth_full(6),
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
)
_LLAMA4 = Family(every_nth_full(4, other=CHUNKED))
_QWEN3_NEXT = Family(every_nth_full(4, other=RECURRENT), state=states.gated_delta_net)
_KIMI = Family(None, latent, states.kimi_delta, state_dtype="float32")
_MLA = Family(every_layer(FULL), latent)
_SPARSE_MLA = Family(every_layer(FULL), latent, extra=_indexers)
_GEMMA4 = Family(None, gemma4, extra=_shared_tail)
_GEMMA3N = Family(None, extra=_shared_tail)
_LFM = Family(None, state=states.short_conv)
_INKLING = Family(
    None,
    sliding_heads_of_their_own,
    states.four_short_convs,
    words={BOTH: (FULL, STATE), "hybrid_sliding": (SLIDING, STATE)},
)

FAMILIES: dict[str, Family] = {
    "afmoe": Family(every_nth_full(4)),
    "baichuan_m1": Family(None, baichuan_m1, extra=_key_value_convs),
    "bailing_hybrid": _KIMI,
    "bamba": Family(None, state=states.mamba2),
    "cohere2": Family(every_nth_full(4)),
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v32": _SPARSE_MLA,
    "exaone4": Family(every_layer(FULL)),
    "falcon_h1": Family(every_layer(BOTH), state=states.mamba2, words={BOTH: (FULL, STATE)}),
    "gemma2": Family(every_nth_full(2)),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma3n": _GEMMA3N,
    "gemma3n_text": _GEMMA3N,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "glm_moe_dsa": _SPARSE_MLA,
    "gpt_oss": Family(every_nth_full(2)),
    "granitemoehybrid": Family(None, state=states.mamba2),
    "inkling2": _INKLING,
    "inkling2_text": _INKLING,
    "jamba": Family(None, state=states.mamba1),
    "kimi_k3": _KIMI,
    "kimi_linear": _KIMI,
    "lara_mini": Family(None, state=states.gated_delta_net),
    "lfm2": _LFM,
    "lfm2_moe": _LFM,
    "lfm3": _LFM,
    "llama": Family(every_layer(FULL)),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "mamba2": Family(every_layer(RECURRENT), state=states.mamba2),
    "mimo_v2_flash": Family(None, sliding_heads_of_their_own),
    "minimax_text_01": Family(None, state=states.lightning),
    "mistral": Family(all_sliding_if_windowed),
    "mixtral": Family(all_sliding_if_windowed),
    "nemotron_h": Family(None, state=states.mamba2, state_dtype="float32"),
    "olmo3": Family(every_nth_full(4)),
    "olmo_hybrid": Family(None, state=states.gated_delta_net),
    "phi4flash": Family(samba_then_shared, state=states.mamba1),
    "qwen2": Family(upper_layers_slide),
    "qwen3": Family(upper_layers_slide),
    "qwen3_moe": Family(upper_layers_slide),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _QWEN3_NEXT,
    "qwen3_5_moe": _QWEN3_NEXT,
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_NEXT,
    "recurrent_gemma": Family(
        None, state=states.rg_lru, words={"attention": (SLIDING,)}, state_dtype="float32"
    ),
    "step3p7": Family(None),
    "zamba2": Family(None, zamba2, states.mamba2, words={BOTH: (FULL, STATE)}),
}
"""By the file's `model_type`."""

ARCHITECTURES: dict[str, str] = {
    "AfmoeForCausalLM": "afmoe",
    "BambaForCausalLM": "bamba",
    "Cohere2ForCausalLM": "cohere2",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "Exaone4ForCausalLM": "exaone4",
    "FalconH1ForCausalLM": "falcon_h1",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForConditionalGeneration": "gemma4",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "JambaForCausalLM": "jamba",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "KimiLinearForCausalLM": "kimi_linear",
    "LaraMiniForCausalLM": "lara_mini",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "Lfm3ForCausalLM": "lfm3",
    "Llama4ForCausalLM": "llama4_text",
    "Llama4ForConditionalGeneration": "llama4",
    "LlamaForCausalLM": "llama",
    "Mamba2ForCausalLM": "mamba2",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash",
    "MiniMaxM3ForCausalLM": "minimax_m3",
    "MiniMaxText01ForCausalLM": "minimax_text_01",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "NemotronHForCausalLM": "nemotron_h",
    "Olmo3ForCausalLM": "olmo3",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    "Phi4FlashForCausalLM": "phi4flash",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "RecurrentGemmaForCausalLM": "recurrent_gemma",
    "Step3p7FlashForCausalLM": "step3p7",
    "Zamba2ForCausalLM": "zamba2",
}
"""The family of each entry of `architectures`, for files without a `model_type`."""

NOT_MODELLED: dict[str, str] = {
    "deepseek_v4": "it compresses keys 4 or 128 times, layer by layer, beside a window of 128 tokens",
    "minimax_m3": "it adds block-sparse indexers to full attention",
    "zaya": "it keeps convolution states inside its attention",
}
"""Families that are known but not planned, and why."""


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that the file's `model_type` or `architectures` names.

    Raises JaxkvError with the keys that were looked for, what they held, and what is known.
    """
    named = config.get("architectures")
    architectures = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    model_type = config.get("model_type")
    for name in (model_type, *(ARCHITECTURES.get(architecture) for architecture in architectures)):
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
        if isinstance(name, str) and name in NOT_MODELLED:
            raise JaxkvError(
                f"model_type {name!r} keeps a kind of cache that is not modelled: {NOT_MODELLED[name]}"
            )
    text = TextConfig(config)
    stated = [key for key in PATTERN_KEYS if text.get(key) is not None]
    raise JaxkvError(
        f"unknown architecture: looked for model_type (found {model_type!r}) and architectures (found "
        f"{named!r}); known values of model_type are {', '.join(sorted(FAMILIES))}. Of the keys that state a "
        f"layer pattern ({', '.join(PATTERN_KEYS)}) the file has {', '.join(stated) or 'none'}; what its "
        f"layers keep can be given with --layers FILE"
    )
