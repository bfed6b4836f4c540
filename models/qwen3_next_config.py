"""The sizes and constants of a Qwen3-Next model, read from config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from models.config_fields import ConfigFields
from models.rope_config import RopeConfig
from models.sizes import AttentionSizes, DeltaNetSizes, ExpertSizes

# Class defaults of transformers' Qwen3NextConfig.
ATTENTION = AttentionSizes(num_heads=16, num_kv_heads=2, head_size=256)
DELTA_NET = DeltaNetSizes(
    num_key_heads=16, num_value_heads=32, key_head_size=128, value_head_size=128, conv_kernel=4
)
EXPERTS = ExpertSizes(num_experts=512, experts_per_token=10, inner_size=512, shared_size=512)
ROPE = RopeConfig(10_000.0, 0.25)
LAYER_TYPES = ("linear_attention", "full_attention")


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig:
    """attends: for each layer whether it attends; the others are gated DeltaNet.
    has_experts: for each layer whether its MLP is a mixture of experts; the others have intermediate_size.
    tied: the embedding serves as the output matrix.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attends: tuple[bool, ...]
    has_experts: tuple[bool, ...]
    attention: AttentionSizes
    delta_net: DeltaNetSizes
    experts: ExpertSizes
    rope: RopeConfig
    rms_norm_eps: float
    tied: bool
    max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.turning < 2 or self.turning % 2:
            raise ValueError(
                f"{self.rope.fraction} of a head of {self.attention.head_size} elements are {self.turning} "
                "that turn; they must be an even number"
            )

    @property
    def turning(self) -> int:
        """Elements of a head that turn with the position."""
        return int(self.attention.head_size * self.rope.fraction)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads config.json of Qwen3NextForCausalLM. Absent fields take the defaults of transformers'
        Qwen3NextConfig. ValueError for what is out of range or not supported (attention biases, other
        activations, scaled rotations).
        """
        fields = ConfigFields(config, where="config.json")
        fields.require("hidden_act", ["silu"], "silu")
        fields.require("attention_bias", [False], False)
        fields.require("use_sliding_window", [False], False)
        fields.require("tie_word_embeddings", [True, False], False)
        num_layers = fields.integer("num_hidden_layers", 48)
        return cls(
            vocab_size=fields.integer("vocab_size", 151_936),
            hidden_size=fields.integer("hidden_size", 2048),
            intermediate_size=fields.integer("intermediate_size", 5632),
            attends=_attends(fields, num_layers),
            has_experts=_has_experts(fields, num_layers),
            attention=AttentionSizes.from_hf(fields, ATTENTION),
            delta_net=DeltaNetSizes.from_hf(fields, DELTA_NET),
            experts=ExpertSizes.from_hf(fields, EXPERTS),
            rope=RopeConfig.from_hf(fields, ROPE),
            rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
            tied=fields.get("tie_word_embeddings", False),
            max_position_embeddings=fields.integer("max_position_embeddings", 32_768),
        )


def _attends(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    types = fields.words("layer_types", num_layers, LAYER_TYPES)
    if types is not None:
        return tuple(kind == "full_attention" for kind in types)
    interval = fields.integer("full_attention_interval", 4)
    return tuple((i + 1) % interval == 0 for i in range(num_layers))


def _has_experts(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Every decoder_sparse_step-th layer, but for those in mlp_only_layers."""
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(i in range(num_layers) for i in dense):
        raise fields.refusal("mlp_only_layers", f"a list of layers of {num_layers}")
    return tuple((i + 1) % step == 0 and i not in dense for i in range(num_layers))
