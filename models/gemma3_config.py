"""The sizes and constants of a Gemma 3 text model, read from config.json or from GGUF metadata."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from models.config_fields import ConfigFields, check_head_turns
from models.sizes import AttentionSizes

# GGUF files of Gemma 3 omit these; every published Gemma 3 has them.
ROPE_LOCAL_THETA = 10_000.0
SLIDING_WINDOW_PATTERN = 6
# The one published Gemma 3 whose query scale is not head_size ** -0.5; GGUF files omit that too, so llama.cpp
# recognises it by its number of layers. Its scale is (hidden_size / num_heads) ** -0.5.
NUM_LAYERS_27B = 62


@dataclass(frozen=True, kw_only=True)
class Gemma3Config:
    """attention: heads of all layers.
    is_sliding: for each layer whether it attends only to the last sliding_window tokens.
    rope_scaling_factor: divides positions in full layers ("linear" scaling).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    attention: AttentionSizes
    sliding_window: int
    is_sliding: tuple[bool, ...]
    max_position_embeddings: int
    query_pre_attn_scalar: float
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    rope_local_theta: float = ROPE_LOCAL_THETA
    rope_scaling_factor: float = 1.0
    attn_logit_softcap: float | None = None
    final_logit_softcap: float | None = None

    def __post_init__(self) -> None:
        check_head_turns(self.attention.head_size)
        if len(self.is_sliding) != self.num_layers:
            raise ValueError(f"{len(self.is_sliding)} layer types for {self.num_layers} layers")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads config.json of Gemma3ForCausalLM, or the text part of Gemma3ForConditionalGeneration.

        Absent fields take the defaults of transformers' Gemma3TextConfig. ValueError for what is missing, out
        of range or not supported (untied embeddings, attention biases, bidirectional attention, other rope
        scalings).
        """
        fields = ConfigFields(config, where="config.json")
        if "text_config" in config:
            fields = fields.section("text_config")
        fields.require("tie_word_embeddings", [True], True)
        fields.require("attention_bias", [False], False)
        fields.require("use_bidirectional_attention", [False], False)
        fields.require("hidden_activation", ["gelu_pytorch_tanh"], "gelu_pytorch_tanh")
        num_layers = fields.integer("num_hidden_layers")
        rope = fields.section("rope_parameters")
        full, local = rope.section("full_attention"), rope.section("sliding_attention")
        scaling = fields.section("rope_scaling") if fields.get("rope_scaling") else full
        return cls(
            vocab_size=fields.integer("vocab_size", 262_208),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            attention=AttentionSizes.from_hf(
                fields, AttentionSizes(num_heads=8, num_kv_heads=4, head_size=256)
            ),
            sliding_window=fields.integer("sliding_window", 4096),
            is_sliding=_layer_types(fields, num_layers),
            max_position_embeddings=fields.integer("max_position_embeddings", 131_072),
            query_pre_attn_scalar=fields.positive("query_pre_attn_scalar", 256),
            rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
            rope_theta=full.positive("rope_theta", fields.positive("rope_theta", 1_000_000.0)),
            rope_local_theta=local.positive(
                "rope_theta", fields.positive("rope_local_base_freq", ROPE_LOCAL_THETA)
            ),
            rope_scaling_factor=_linear_factor(scaling),
            attn_logit_softcap=fields.positive_or_none("attn_logit_softcapping"),
            final_logit_softcap=fields.positive_or_none("final_logit_softcapping"),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """Reads a GGUF file's metadata. ValueError for what is missing or out of range."""
        fields = ConfigFields(metadata, "gemma3.", where="the GGUF metadata")
        num_layers = fields.integer("block_count")
        hidden_size = fields.integer("embedding_length")
        num_heads = fields.integer("attention.head_count")
        head_size = fields.integer("attention.key_length")
        if fields.integer("attention.value_length", head_size) != head_size:
            raise fields.refusal("attention.value_length", f"{head_size}, the key length")
        pattern = fields.integer("attention.sliding_window_pattern", SLIDING_WINDOW_PATTERN)
        fields.require("rope.scaling.type", ["none", "linear"], "none")
        return cls(
            vocab_size=fields.integer("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("feed_forward_length"),
            num_layers=num_layers,
            attention=AttentionSizes(
                num_heads=num_heads,
                num_kv_heads=fields.integer("attention.head_count_kv"),
                head_size=head_size,
            ),
            sliding_window=fields.integer("attention.sliding_window"),
            is_sliding=_every_nth_full(num_layers, pattern),
            max_position_embeddings=fields.integer("context_length"),
            query_pre_attn_scalar=hidden_size / num_heads if num_layers == NUM_LAYERS_27B else head_size,
            rms_norm_eps=fields.positive("attention.layer_norm_rms_epsilon", 1e-6),
            rope_theta=fields.positive("rope.freq_base", 1_000_000.0),
            rope_local_theta=fields.positive("rope.freq_base_swa", ROPE_LOCAL_THETA),
            rope_scaling_factor=fields.positive("rope.scaling.factor", 1.0),
            attn_logit_softcap=fields.positive_or_none("attn_logit_softcapping"),
            final_logit_softcap=fields.positive_or_none("final_logit_softcapping"),
        )


def _every_nth_full(num_layers: int, n: int) -> tuple[bool, ...]:
    return tuple((i + 1) % n != 0 for i in range(num_layers))


def _layer_types(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    types = fields.words("layer_types", num_layers, ("sliding_attention", "full_attention"))
    if types is not None:
        return tuple(kind == "sliding_attention" for kind in types)
    pattern = "sliding_window_pattern"
    if fields.get(pattern) is None:
        pattern = "_sliding_window_pattern"
    return _every_nth_full(num_layers, fields.integer(pattern, SLIDING_WINDOW_PATTERN))


def _linear_factor(scaling: ConfigFields) -> float:
    """The factor of a "linear" rope scaling, 1 where there is none; older files say "type" for
    "rope_type"."""
    key = "type" if scaling.get("rope_type") is None else "rope_type"
    scaling.require(key, ["default", "linear"], "default")
    return scaling.positive("factor") if scaling.get(key) == "linear" else 1.0
