"""The sizes of a Jamba model, read from config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from models.config_fields import ConfigFields


@dataclass(frozen=True, kw_only=True)
class JambaConfig:
    """num_heads query heads share num_kv_heads key and value heads of head_size elements.

    attends: for each layer whether it attends; the others are Mamba 1, with `channels` channels of
    `state_size` numbers, convolutions over conv_kernel tokens and time steps of rank time_rank.
    has_experts: for each layer whether its MLP is experts_per_token of num_experts experts.
    tied: the embedding serves as the output matrix.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    attends: tuple[bool, ...]
    has_experts: tuple[bool, ...]
    num_experts: int
    experts_per_token: int
    channels: int
    state_size: int
    conv_kernel: int
    time_rank: int
    rms_norm_eps: float
    tied: bool
    max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is no multiple of {self.num_heads} heads")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key and value heads evenly"
            )
        if any(self.has_experts) and self.experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.experts_per_token} is more than num_experts {self.num_experts}"
            )

    @property
    def head_size(self) -> int:
        """Elements of an attention head."""
        return self.hidden_size // self.num_heads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads config.json of JambaForCausalLM. Absent fields take the defaults of transformers'
        JambaConfig. ValueError for what is missing, out of range or not supported (biases of the Mamba
        projections, convolutions without bias, other activations, sliding windows).
        """
        fields = ConfigFields(config, where="config.json")
        fields.require("hidden_act", ["silu"], "silu")
        fields.require("mamba_conv_bias", [True], True)
        fields.require("mamba_proj_bias", [False], False)
        fields.require("sliding_window", [None], None)
        fields.require("tie_word_embeddings", [True, False], False)
        num_layers = fields.integer("num_hidden_layers", 32)
        num_experts = fields.integer("num_experts", 16)
        hidden_size = fields.integer("hidden_size", 4096)
        rank = fields.get("mamba_dt_rank", "auto")
        return cls(
            vocab_size=fields.integer("vocab_size", 65_536),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", 14_336),
            num_heads=fields.integer("num_attention_heads", 32),
            num_kv_heads=fields.integer("num_key_value_heads", 8),
            attends=_every(fields, "attn_layer", 8, 4, num_layers),
            has_experts=tuple(
                num_experts > 1 and chosen for chosen in _every(fields, "expert_layer", 2, 1, num_layers)
            ),
            num_experts=num_experts,
            experts_per_token=fields.integer("num_experts_per_tok", 2),
            channels=hidden_size * fields.integer("mamba_expand", 2),
            state_size=fields.integer("mamba_d_state", 16),
            conv_kernel=fields.integer("mamba_d_conv", 4, minimum=2),
            time_rank=-(-hidden_size // 16) if rank == "auto" else fields.integer("mamba_dt_rank"),
            rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
            tied=fields.get("tie_word_embeddings", False),
            max_position_embeddings=fields.integer("max_position_embeddings", 262_144),
        )


def _every(fields: ConfigFields, name: str, period: int, offset: int, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer is one of those that come once in `{name}_period` layers, first `{name}_offset`."""
    period = fields.integer(f"{name}_period", period)
    offset = fields.integer(f"{name}_offset", offset, minimum=0)
    if offset >= period:
        raise fields.refusal(f"{name}_offset", f"less than {name}_period, {period}")
    return tuple(i % period == offset for i in range(num_layers))
