"""Sizes of parts that several families have, as their config.json spells them."""

from dataclasses import dataclass
from typing import Self

from models.config_fields import ConfigFields


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """num_heads query heads share num_kv_heads key and value heads of head_size elements."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key and value heads evenly"
            )

    @classmethod
    def from_hf(cls, fields: ConfigFields, default: Self) -> Self:
        """Absent fields take the values of `default`."""
        return cls(
            num_heads=fields.integer("num_attention_heads", default.num_heads),
            num_kv_heads=fields.integer("num_key_value_heads", default.num_kv_heads),
            head_size=fields.integer("head_dim", default.head_size),
        )


@dataclass(frozen=True, kw_only=True)
class DeltaNetSizes:
    """Gated DeltaNet. Each of num_key_heads queries and keys serves the same number of value heads.

    conv_kernel: tokens that the convolution before the recurrence sees.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_size: int
    value_head_size: int
    conv_kernel: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"{self.num_value_heads} value heads cannot share {self.num_key_heads} key heads evenly"
            )

    @property
    def key_size(self) -> int:
        """Elements of all keys of a token."""
        return self.num_key_heads * self.key_head_size

    @property
    def value_size(self) -> int:
        """Elements of all values of a token."""
        return self.num_value_heads * self.value_head_size

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @classmethod
    def from_hf(cls, fields: ConfigFields, default: Self) -> Self:
        """Absent fields take the values of `default`."""
        return cls(
            num_key_heads=fields.integer("linear_num_key_heads", default.num_key_heads),
            num_value_heads=fields.integer("linear_num_value_heads", default.num_value_heads),
            key_head_size=fields.integer("linear_key_head_dim", default.key_head_size),
            value_head_size=fields.integer("linear_value_head_dim", default.value_head_size),
            conv_kernel=fields.integer("linear_conv_kernel_dim", default.conv_kernel, minimum=2),
        )


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """experts_per_token of num_experts MLPs of inner_size, and one of shared_size for every token.

    renormalise: the weights of a token's experts sum to 1.
    """

    num_experts: int
    experts_per_token: int
    inner_size: int
    shared_size: int
    renormalise: bool = True

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.experts_per_token} is more than num_experts {self.num_experts}"
            )

    @classmethod
    def from_hf(cls, fields: ConfigFields, default: Self) -> Self:
        """Absent fields take the values of `default`."""
        fields.require("norm_topk_prob", [True, False], default.renormalise)
        return cls(
            num_experts=fields.integer("num_experts", default.num_experts),
            experts_per_token=fields.integer("num_experts_per_tok", default.experts_per_token),
            inner_size=fields.integer("moe_intermediate_size", default.inner_size),
            shared_size=fields.integer("shared_expert_intermediate_size", default.shared_size),
            renormalise=fields.get("norm_topk_prob", default.renormalise),
        )
