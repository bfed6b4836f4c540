"""Places of tokens in rows of four elements a word: a row of 128 words is two tiles of K, and two of V.

The first tile holds the first halves of all tokens of the row, the second the second halves. So q is cut in
halves, too; see `places` for why a query has a row for each place.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES, AttentionPageLayout
from pallas_kernels.tpu.places import Places
from pallas_kernels.tpu.running import Softmax


@dataclass(frozen=True)
class HalvedPlaces(Places):
    """`count` tokens share a row of 128 words, half a head's elements each; 1 for heads of 256 and more."""

    @classmethod
    def of(cls, layout: AttentionPageLayout) -> "HalvedPlaces":
        return cls(layout.head_size, max(2 * LANES // layout.head_size, 1))

    @property
    def half(self) -> int:
        """Elements of half a head."""
        return self.head_size // 2

    @property
    def width(self) -> int:
        return max(self.head_size, 2 * LANES)

    def repeat(self, q: jax.Array) -> jax.Array:
        """`[..., rows, D]` -> `[..., rows, width]`: the halves of q in the lanes of every place."""
        if self.count == 1:
            return q
        halves = q.reshape(*q.shape[:-1], 2, self.half)
        return jnp.tile(halves, self.count).reshape(*q.shape[:-1], self.width)

    def _place_of(self, lane: jax.Array) -> jax.Array:
        return lane % LANES // self.half

    def merge(self, softmax: Softmax) -> Softmax:
        """The softmax of all places, its elements in order; lanes from `head_size` on have no meaning."""
        if self.count == 1:
            return softmax
        rows = softmax.top.shape[0] // self.count
        merged = None
        for place in range(self.count):
            part = Softmax(*(x[place * rows : (place + 1) * rows] for x in softmax))
            part = part._replace(weighted=self._in_order(part.weighted, place))
            merged = part if merged is None else merged.merge(part)
        assert merged is not None
        return merged

    def _in_order(self, weighted: jax.Array, place: int) -> jax.Array:
        """A place's elements `[rows, 128]` from the lanes of both its tiles `[rows, 256]`."""
        first = pltpu.roll(weighted[:, :LANES], (LANES - place * self.half) % LANES, 1)
        second = pltpu.roll(weighted[:, LANES:], (LANES + self.half - place * self.half) % LANES, 1)
        lane = lax.broadcasted_iota(jnp.int32, first.shape, 1)
        return jnp.where(lane < self.half, first, second)
