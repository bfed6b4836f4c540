"""Rows of 128 scales from the pages of a run of 8-bit numbers.

A vector of scales is what a page keeps for K, or V, of one head: `block_size` numbers. Of pages of fewer than
128 tokens, one row holds several vectors, and a few pages together have the 128 tokens of a row.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.layout import KEY_SCALES, LANES, AttentionPageLayout, float_of
from pallas_kernels.tpu.operands import SUBLANES


@dataclass(frozen=True)
class ScaleRows:
    """Rows of scales of `layout`'s pages; `block_size` is a multiple of 128 or divides it."""

    layout: AttentionPageLayout

    @property
    def pages(self) -> int:
        """Pages that have the tokens of one row together."""
        return max(LANES // self.layout.block_size, 1)

    @property
    def vectors(self) -> int:
        """Vectors of scales of a page: of K of every head, then of V."""
        return 2 * self.layout.num_kv_heads

    def lane_of(self, token: jax.Array) -> jax.Array:
        """Where a row from `load` has `token [vectors, 128]` of its 128 tokens."""
        vector = lax.broadcasted_iota(jnp.int32, token.shape, 0)
        return (token + vector * self.layout.block_size) % LANES

    def load(self, buffer, row: int) -> jax.Array:
        """Row number `row` of 128 tokens of a run `[pages, rows, 128]`, float32 `[vectors, 128]`.

        A vector is turned by its number times `block_size` lanes: see `lane_of`.
        """
        size = self.layout.block_size
        top = self.layout.first_word(0, KEY_SCALES) // LANES
        if size >= LANES:
            page, row_of_page = divmod(row, size // LANES)
            rows = pl.ds(top + row_of_page, self.vectors, stride=size // LANES)
            return float_of(buffer[page, rows])
        count = -(-self.vectors // self.pages)
        rows_of_tile = SUBLANES // self.pages
        tiles = []
        for first in range(0, count, rows_of_tile):
            rows = [top + min(first + index, count - 1) for index in range(rows_of_tile)]
            tiles.append(self._vectors_apart(buffer, row * self.pages, rows))
        return float_of(jnp.concatenate(tiles, axis=0)[: self.vectors])

    def _vectors_apart(self, buffer, first_page: int, rows: list[int]) -> jax.Array:
        """Words of the vectors in some rows of a few pages, `[8, 128]`: what a page has becomes lanes."""
        sources = [(first_page + page, row) for row in rows for page in range(self.pages)]
        shape = (SUBLANES, LANES)
        sublane, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        words = jnp.zeros(shape, jnp.uint32)
        for index, (page, row) in enumerate(sources):
            here = jnp.broadcast_to(buffer[page, row : row + 1], shape)
            words = jnp.where(sublane == index, here, words)
        # Every page turned by its number of blocks, no two blocks of a vector are in the same lanes.
        turned = jnp.take_along_axis(words, (lane - sublane * self.layout.block_size) % LANES, axis=1)
        page = (lane // self.layout.block_size - sublane) % self.pages
        return jnp.take_along_axis(turned, sublane - sublane % self.pages + page, axis=0)
