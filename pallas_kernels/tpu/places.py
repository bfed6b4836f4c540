"""Tokens that share a row of 128 words (heads of 64 and less): attended apart, merged at the end.

A query has one row for each place in a 128-word row, zero in the lanes of the other places. Its products then
see the tokens at that place only.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES
from pallas_kernels.tpu.running import HIDDEN, LOG2_E, Softmax


@dataclass(frozen=True)
class Places:
    """The places of heads of `head_size`: `count` of them, 1 for heads of 128 and more."""

    head_size: int

    @property
    def count(self) -> int:
        """Tokens of a row of 128 words."""
        return max(LANES // self.head_size, 1)

    def spread(self, q: jax.Array) -> jax.Array:
        """`[..., rows, D]` -> `[..., count * rows, width]`, the places one after another."""
        lead = [(0, 0)] * (q.ndim - 1)
        others = (self.count - 1) * self.head_size
        return jnp.concatenate(
            [
                jnp.pad(q, [*lead, (place * self.head_size, others - place * self.head_size)])
                for place in range(self.count)
            ],
            axis=-2,
        )

    def spread_sinks(self, sinks: jax.Array) -> jax.Array:
        """Sinks `[..., rows]` as tops `[..., count * rows, 128]` in powers of two: a sink counts once."""
        tops = sinks.astype(jnp.float32) * LOG2_E
        hidden = [jnp.full_like(tops, HIDDEN)] * (self.count - 1)
        tops = jnp.concatenate([tops, *hidden], axis=-1)[..., None]
        return jnp.broadcast_to(tops, (*tops.shape[:-1], LANES))

    def merge(self, softmax: Softmax) -> Softmax:
        """The softmax of all places; lanes of `weighted` from `head_size` on have no meaning."""
        rows = softmax.top.shape[0] // self.count
        parts = [
            Softmax(*(x[place * rows : (place + 1) * rows] for x in softmax)) for place in range(self.count)
        ]
        merged = parts[0]
        for place, part in enumerate(parts[1:], start=1):
            moved = pltpu.roll(part.weighted, LANES - place * self.head_size, 1)
            merged = merged.merge(part._replace(weighted=moved))
        return merged
