"""A convolution whose channels are the queries, keys and values of the gated delta rule."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.recurrent.inputs import DeltaInputs, KeyScaling
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_layout import StateLayout
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable


class ConvDeltaInputs(NamedTuple):
    """x `[T, C]`, weight `[C, K]`, bias `[C]` or None, of the convolution; silu: of its outputs; g, beta
    `[T, Hv]` as in `DeltaInputs`.
    """

    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None
    silu: bool
    g: jax.Array
    beta: jax.Array


@dataclass(frozen=True, kw_only=True)
class ConvDeltaPlace:
    """Where the two parts of a state are: `conv` `[C, K - 1]` and `state` `[Hv, dv, dk]`.

    C is `(2 * Hk * dk) + Hv * dv`: all queries, then keys, then values.
    """

    conv: StatePlace
    state: StatePlace

    @property
    def layout(self) -> StateLayout:
        """Of the state."""
        return self.state.layout

    @property
    def key_heads(self) -> int:
        """Hk. Raises ValueError where the channels are not those of whole heads."""
        heads, value_size, key_size = self.state.shape
        channels, values = self.conv.shape[0], heads * value_size
        key_heads, left = divmod(channels - values, 2 * key_size)
        if key_heads < 1 or left or heads % key_heads:
            raise ValueError(
                f"{channels} channels are not {heads} values of {value_size} with queries and keys of "
                f"{key_size} for a number of heads that divides {heads}"
            )
        return key_heads

    def heads(self, channels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q, k `[..., Hk, dk]` and v `[..., Hv, dv]` of `[..., C]`."""
        heads, value_size, key_size = self.state.shape
        lead, keys = channels.shape[:-1], self.key_heads * key_size
        return (
            channels[..., :keys].reshape(*lead, -1, key_size),
            channels[..., keys : 2 * keys].reshape(*lead, -1, key_size),
            channels[..., 2 * keys :].reshape(*lead, heads, value_size),
        )


def in_turn(
    conv: Callable[..., StepResult], delta_rule: Callable[..., StepResult]
) -> Callable[..., StepResult]:
    """One operation from the two."""

    def run(
        inputs: ConvDeltaInputs,
        scaling: KeyScaling,
        pages: jax.Array,
        batch: RaggedBatch,
        table: StateTable,
        place: ConvDeltaPlace,
    ) -> StepResult:
        x, weight, bias, silu, g, beta = inputs
        out, pages = conv(x, weight, bias, pages, batch, table, place.conv, silu=silu)
        q, k, v = place.heads(out.astype(x.dtype))
        return delta_rule(DeltaInputs(q, k, v, g, beta), scaling, pages, batch, table, place.state)

    return run
