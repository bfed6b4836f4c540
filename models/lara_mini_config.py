"""The sizes and constants of a Lara-mini model, read from config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from models.config_fields import ConfigFields, check_head_turns
from models.rope_config import RopeConfig
from models.sizes import AttentionSizes, DeltaNetSizes, ExpertSizes

# Class defaults of transformers' LaraMiniConfig.
ATTENTION = AttentionSizes(num_heads=16, num_kv_heads=4, head_size=128)
DELTA_NET = DeltaNetSizes(
    num_key_heads=8, num_value_heads=16, key_head_size=128, value_head_size=128, conv_kernel=4
)
EXPERTS = ExpertSizes(num_experts=128, experts_per_token=4, inner_size=512, shared_size=512)
ROPE = RopeConfig(10_000.0)
PATTERN = (
    "linear_attention",
    "sliding_attention",
    "linear_attention",
    "full_attention",
    "sliding_attention",
)


@dataclass(frozen=True, kw_only=True)
class LaraMiniConfig:
    """layer_types: of each layer "linear_attention" (gated DeltaNet), "sliding_attention" (the last
    sliding_window tokens) or "full_attention".
    tied: the embedding serves as the output matrix.
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    sliding_window: int
    attention: AttentionSizes
    delta_net: DeltaNetSizes
    experts: ExpertSizes
    rope: RopeConfig
    rms_norm_eps: float
    tied: bool
    max_position_embeddings: int

    def __post_init__(self) -> None:
        check_head_turns(self.attention.head_size)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads config.json of LaraMiniForCausalLM. Absent fields take the defaults of transformers'
        LaraMiniConfig. ValueError for what is out of range or not supported (attention biases, other
        activations, scaled or partial rotations).
        """
        fields = ConfigFields(config, where="config.json")
        fields.require("hidden_act", ["silu"], "silu")
        fields.require("attention_bias", [False], False)
        fields.require("partial_rotary_factor", [1.0], 1.0)
        fields.section("rope_parameters").require("partial_rotary_factor", [1.0], 1.0)
        fields.require("tie_word_embeddings", [True, False], True)
        num_layers = fields.integer("num_hidden_layers", 34)
        types = fields.words("layer_types", num_layers, sorted(set(PATTERN)))
        if types is None:
            types = tuple(PATTERN[i % len(PATTERN)] for i in range(num_layers))
        return cls(
            vocab_size=fields.integer("vocab_size", 151_936),
            hidden_size=fields.integer("hidden_size", 1024),
            layer_types=types,
            sliding_window=fields.integer("sliding_window", 512),
            attention=AttentionSizes.from_hf(fields, ATTENTION),
            delta_net=DeltaNetSizes.from_hf(fields, DELTA_NET),
            experts=ExpertSizes.from_hf(fields, EXPERTS),
            rope=RopeConfig.from_hf(fields, ROPE),
            rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
            tied=fields.get("tie_word_embeddings", True),
            max_position_embeddings=fields.integer("max_position_embeddings", 131_072),
        )
