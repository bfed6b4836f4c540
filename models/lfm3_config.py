"""The sizes and constants of an LFM3 model, read from config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from models.config_fields import ConfigFields, check_head_turns
from models.rope_config import RopeConfig, require_rope_type
from models.sizes import AttentionSizes

# Class defaults of transformers' Lfm3Config.
ATTENTION = AttentionSizes(num_heads=16, num_kv_heads=4, head_size=128)
SLIDING_ROPE, FULL_ROPE = RopeConfig(10_000.0), RopeConfig(1_000_000.0, 0.5)
LAYER_TYPES = ("conv", "sliding_attention", "full_attention")


@dataclass(frozen=True, kw_only=True)
class Lfm3Config:
    """layer_types: of each layer "conv" (over conv_kernel tokens), "sliding_attention" (the last
    sliding_window tokens) or "full_attention".
    sliding_rope, full_rope: `fraction` is of the angles.
    has_output_norms: what a mixer and an MLP give is normed before it is added.
    has_attention_gate: every head's output is scaled by a gate.
    tied: the embedding serves as the output matrix.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    conv_kernel: int
    sliding_window: int
    attention: AttentionSizes
    sliding_rope: RopeConfig
    full_rope: RopeConfig
    has_output_norms: bool
    has_attention_gate: bool
    rms_norm_eps: float
    tied: bool
    max_position_embeddings: int

    def __post_init__(self) -> None:
        check_head_turns(self.attention.head_size)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads config.json of Lfm3ForCausalLM. Absent fields take the defaults of transformers' Lfm3Config.
        ValueError for what is missing, out of range or not supported (biases, scaled rotations).
        """
        fields = ConfigFields(config, where="config.json")
        fields.require("conv_bias", [False], False)
        fields.require("attention_bias", [False], False)
        for flag in ("tie_word_embeddings", "use_sandwich_norm", "use_attention_gate"):
            fields.require(flag, [True, False], True)
        num_layers = fields.integer("num_hidden_layers", 24)
        return cls(
            vocab_size=fields.integer("vocab_size", 128_000),
            hidden_size=fields.integer("hidden_size", 2048),
            intermediate_size=fields.integer("intermediate_size", 7680),
            layer_types=fields.words("layer_types", num_layers, LAYER_TYPES) or _published(num_layers),
            conv_kernel=fields.integer("conv_L_cache", 7, minimum=2),
            sliding_window=fields.integer("sliding_window", 256),
            attention=AttentionSizes.from_hf(fields, ATTENTION),
            sliding_rope=_rope(fields, "sliding_attention", SLIDING_ROPE),
            full_rope=_rope(fields, "full_attention", FULL_ROPE),
            has_output_norms=fields.get("use_sandwich_norm", True),
            has_attention_gate=fields.get("use_attention_gate", True),
            rms_norm_eps=fields.positive("norm_eps", 1e-5),
            tied=fields.get("tie_word_embeddings", True),
            max_position_embeddings=fields.integer("max_position_embeddings", 128_000),
        )


def _published(num_layers: int) -> tuple[str, ...]:
    """Every second layer is a convolution, the first two too; the others attend by turns."""
    by_remainder = ("sliding_attention", "conv", "full_attention", "conv")
    return tuple(by_remainder[i % 4] if i else "conv" for i in range(num_layers))


def _rope(fields: ConfigFields, kind: str, default: RopeConfig) -> RopeConfig:
    """Of the layers of a kind; `default` where the file says nothing of rotations."""
    if fields.get("rope_parameters") is None:
        return default
    rope = fields.section("rope_parameters").section(kind)
    rope.require("factor", [1.0], 1.0)
    is_partial = require_rope_type(rope, ["default", "proportional"]) == "proportional"
    fraction = rope.fraction("partial_rotary_factor", 1.0) if is_partial else 1.0
    return RopeConfig(rope.positive("rope_theta"), fraction)
