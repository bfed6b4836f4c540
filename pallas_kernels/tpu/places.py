"""Tokens that share a row of 128 words (heads of 64): attended apart, merged at the end.

A query has one row for each place in a 128-word row, zero in the lanes of the other places. Its products then
see the tokens at that place only. It comes to a kernel as one row, with its elements in the lanes of each.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES, AttentionPageLayout
from pallas_kernels.tpu.running import HIDDEN, LOG2_E, Softmax


@dataclass(frozen=True)
class Places:
    """`count` tokens of heads of `head_size` share a row of 128 words; 1 for all but heads of 64."""

    head_size: int
    count: int

    @classmethod
    def of(cls, layout: AttentionPageLayout) -> "Places":
        """The places in the pages of `layout`."""
        placed = layout.head_size == layout.value_size == LANES // 2 and not layout.latent
        return cls(layout.head_size, 2 if placed else 1)

    @property
    def width(self) -> int:
        """Lanes of q: whole tiles."""
        return -(-self.count * self.head_size // LANES) * LANES

    def repeat(self, q: jax.Array) -> jax.Array:
        """`[..., rows, D]` -> `[..., rows, width]`: q in the lanes of every place."""
        repeated = jnp.tile(q, self.count)
        return jnp.pad(repeated, [(0, 0)] * (q.ndim - 1) + [(0, self.width - repeated.shape[-1])])

    def spread(self, q: jax.Array) -> list[jax.Array]:
        """In a kernel, of `repeat` `[rows, width]`: q for each place, zero in the lanes of the others."""
        if self.count == 1:
            return [q]
        place_of = self._place_of(lax.broadcasted_iota(jnp.int32, q.shape, 1))
        return [jnp.where(place_of == place, q, jnp.zeros_like(q)) for place in range(self.count)]

    def _place_of(self, lane: jax.Array) -> jax.Array:
        """The place whose elements are in a lane of q."""
        return lane // self.head_size

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
