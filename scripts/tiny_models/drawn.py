"""How a tensor of a tiny model is drawn."""

from typing import NamedTuple

STANDARD_DEVIATION = 0.15
"""With the usual 0.02 all logits of a tiny model are nearly equal and hide errors."""


class Drawn(NamedTuple):
    """Values of a normal distribution."""

    shape: tuple[int, ...]
    mean: float = 0.0
    deviation: float = STANDARD_DEVIATION


def norm(size: int) -> Drawn:
    """The weights of a norm that multiplies by them (not by 1 + w)."""
    return Drawn((size,), mean=1.0)


def convolution(channels: int, kernel: int) -> Drawn:
    """A depthwise convolution, wide enough that a channel's earlier inputs count as much as the last."""
    return Drawn((channels, 1, kernel), deviation=0.5)


def log_decay(*shape: int) -> Drawn:
    """Logarithms of decay rates, from slow to fast."""
    return Drawn(shape, deviation=1.0)


def step_bias(size: int) -> Drawn:
    """Before softplus: steps near 0.05, so that a state remembers some tens of tokens."""
    return Drawn((size,), mean=-3.0, deviation=0.5)


def gated_mlp(name: str, hidden: int, inner: int) -> dict[str, Drawn]:
    """An MLP with a gate, under the names that most families give it."""
    return {
        f"{name}.gate_proj.weight": Drawn((inner, hidden)),
        f"{name}.up_proj.weight": Drawn((inner, hidden)),
        f"{name}.down_proj.weight": Drawn((hidden, inner)),
    }
