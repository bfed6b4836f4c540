"""How each family of models spells its layers: one table row a family."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxkv.errors import JaxkvError
from jaxkv.model_config.layer_patterns import (
    CHUNKED,
    Pattern,
    all_full,
    all_sliding_if_windowed,
    every_nth_full,
    upper_layers_slide,
)


class Family(NamedTuple):
    """when_silent: the layers' kinds where the file has no key that states them.
    defaults: keys that the family's files omit where they equal these values.
    """

    when_silent: Pattern
    defaults: Mapping[str, Any] = {}


# Class defaults of transformers' Gemma3TextConfig, omitted by the hub files of the 4B, 12B and 27B models.
_GEMMA3 = Family(
    every_nth_full(6),
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072},
)

FAMILIES: dict[str, Family] = {
    "afmoe": Family(every_nth_full(4)),
    "cohere2": Family(every_nth_full(4)),
    "exaone4": Family(all_full),
    "gemma2": Family(every_nth_full(2)),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gpt_oss": Family(every_nth_full(2)),
    "llama": Family(all_full),
    "llama4": Family(every_nth_full(4, local=CHUNKED)),
    "llama4_text": Family(every_nth_full(4, local=CHUNKED)),
    "mistral": Family(all_sliding_if_windowed),
    "mixtral": Family(all_sliding_if_windowed),
    "olmo3": Family(every_nth_full(4)),
    "qwen2": Family(upper_layers_slide),
    "qwen3": Family(upper_layers_slide),
    "qwen3_moe": Family(upper_layers_slide),
}
"""By the file's `model_type`."""

ARCHITECTURES: dict[str, str] = {
    "AfmoeForCausalLM": "afmoe",
    "Cohere2ForCausalLM": "cohere2",
    "Exaone4ForCausalLM": "exaone4",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GptOssForCausalLM": "gpt_oss",
    "Llama4ForCausalLM": "llama4_text",
    "Llama4ForConditionalGeneration": "llama4",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Olmo3ForCausalLM": "olmo3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""The family of each entry of `architectures`, for files without a `model_type`."""


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
    raise JaxkvError(
        f"unknown architecture: looked for model_type (found {model_type!r}) and architectures (found "
        f"{named!r}); known values of model_type are {', '.join(sorted(FAMILIES))}"
    )
