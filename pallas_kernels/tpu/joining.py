"""Tiles of K and V from tiles of the halves of words, where K and V are not of one size or are one vector."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES, AttentionPageLayout

Tiles = list[jax.Array]


@dataclass(frozen=True)
class Joining:
    """How the strips of `layout` (its planes, or the low and the high halves of its words) are joined.

    A tile is 32-bit numbers `[rows, 128]`, a strip a tile for each 128 of its numbers. Where sizes differ,
    what is paired in words must be whole tiles, and the two halves of the rest whole tiles or fit one tile.
    """

    layout: AttentionPageLayout

    @property
    def refuses(self) -> str | None:
        """Why the sizes of K and V cannot be joined tile by tile, or None."""
        if self.layout.dtype == "float32" or (self._rest == 0 and not self.layout.latent):
            return None
        if self._paired % LANES:
            return f"{self._paired} words of two elements a token are not a multiple of {LANES}"
        if self._rest % LANES and 2 * self._rest > LANES:
            return f"two halves of {self._rest} elements are not whole tiles of {LANES} and do not share one"
        return None

    def join(self, strips: Sequence[Tiles]) -> tuple[Tiles, Tiles]:
        """Tiles of K and of V, elements in order; lanes past the last element have no meaning."""
        size, size_v = self.layout.head_size, self.layout.value_size
        if self.layout.dtype == "float32":
            keys = strips[0]
            return keys, keys[: -(-size_v // LANES)] if self.layout.latent else strips[1]
        paired = -(-self._paired // LANES)
        low, high = (strip[:paired] for strip in strips)
        rest = self._join_rest(*(strip[paired:] for strip in strips))
        if self.layout.latent:
            return low + high + rest, low + high
        return (low + rest, high) if size >= size_v else (low, high + rest)

    @property
    def _paired(self) -> int:
        """Words of a token before its rest: K with V, or the two halves of a latent's V."""
        if self.layout.latent:
            return self.layout.value_size // 2
        return min(self.layout.head_size, self.layout.value_size)

    @property
    def _rest(self) -> int:
        """Words of a token after that."""
        return abs(self.layout.head_size - self.layout.value_size) // 2

    def _join_rest(self, low: Tiles, high: Tiles) -> Tiles:
        if self._rest % LANES == 0:
            return low + high
        lane = lax.broadcasted_iota(jnp.int32, low[0].shape, 1)
        return [jnp.where(lane < self._rest, low[0], pltpu.roll(high[0], self._rest, 1))]
