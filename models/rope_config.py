"""How a layer's rotary embeddings turn, as config.json spells it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from models.config_fields import ConfigFields


@dataclass(frozen=True)
class RopeConfig:
    """theta: the base. fraction: of a head's elements, or of their angles, that turn."""

    theta: float
    fraction: float = 1.0

    @classmethod
    def from_hf(cls, fields: ConfigFields, default: Self) -> Self:
        """Reads rope_parameters, or rope_theta, partial_rotary_factor and rope_scaling of older files.

        Absent fields take the values of `default`. ValueError for any scaling.
        """
        rope = fields.section("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")
        require_rope_type(rope, ["default"])
        theta = fields.positive("rope_theta", default.theta)
        fraction = fields.fraction("partial_rotary_factor", default.fraction)
        return cls(rope.positive("rope_theta", theta), rope.fraction("partial_rotary_factor", fraction))


def require_rope_type(rope: ConfigFields, allowed: Sequence[str]) -> str:
    """The kind of rotation, "default" where none is stated; older files say "type" for "rope_type".
    ValueError for one that is not among `allowed`."""
    key = "type" if rope.get("rope_type") is None else "rope_type"
    rope.require(key, allowed, "default")
    return rope.get(key, "default")
