"""The K and V operands of products, made from a run of pages in VMEM.

A unit is a token of a head, or the tokens that share a row of 128 words (`Places`). An operand has a row for
each unit, in tiles of 128 lanes. Where a unit does not fill whole rows, a few of them together do: every row
that begins like the first of them is shifted alike, so operands hold these units apart, all the first ones,
then all the second ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import gcd, lcm
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import KEY_SCALES, LANES, AttentionPageLayout, float_of
from pallas_kernels.tpu.joining import Joining
from pallas_kernels.tpu.page_loader import PageLoader
from pallas_kernels.tpu.places import Places

PAIRED_ROWS = 16  # rows of one packed bfloat16 tile
SUBLANES = 8
SMALLEST_HEAD = 8
UNROLLED_COPIES = 8


class Operands(NamedTuple):
    """K `[units, heads * key_width]` and V `[units, heads * value_width]`, in the dtype of the products."""

    keys: jax.Array
    values: jax.Array


@dataclass(frozen=True)
class OperandLoader(PageLoader):
    """The loader of pages of bfloat16 and of float32."""

    @cached_property
    def places(self) -> Places:
        """The places of a unit's tokens in its row."""
        return Places.of(self.layout)

    @property
    def refuses(self) -> str | None:
        """Why pages of this layout cannot be loaded, or None."""
        size, size_v = self.layout.head_size, self.layout.value_size
        if size % SMALLEST_HEAD or size_v % SMALLEST_HEAD:
            return f"head sizes {size} and {size_v} of K and V are not multiples of {SMALLEST_HEAD}"
        if (reason := self.joining.refuses) is not None:
            return reason
        together = self.places.count * self.shifts * SUBLANES
        if self.layout.block_size % together:
            return f"block_size {self.layout.block_size} is not a multiple of {together}"
        return None

    @property
    def value_width(self) -> int:
        """Lanes of one head of V."""
        return -(-self.places.count * self.layout.value_size // LANES) * LANES

    @property
    def result_width(self) -> int:
        """Lanes of a result, once places are merged."""
        return self.value_width

    @property
    def whole_pages(self) -> int:
        """Pages whose operands are whole tiles together."""
        return lcm(self.page_units, PAIRED_ROWS) // self.page_units

    @cached_property
    def joining(self) -> Joining:
        """How tiles of words become tiles of K and V."""
        return Joining(self.layout)

    @cached_property
    def shifts(self) -> int:
        """Units that fill whole rows together in every plane."""
        return lcm(*(LANES // gcd(LANES, size) for size in self._unit_words))

    @property
    def interleaves(self) -> bool:
        """Whether two packed rows are made of rows 8 apart: cheaper than packing neighbours."""
        return self.layout.dtype == "bfloat16" and self.dtype == jnp.bfloat16

    def load(self, buffer, first_head: int, heads: int) -> Operands:
        """Operands of some heads from `buffer [pages, rows, 128]`, heads side by side along lanes."""
        tiles = [self._load_head(buffer, first_head + head) for head in range(heads)]
        return Operands(*(jnp.concatenate(list(chain(*side)), axis=1) for side in zip(*tiles, strict=True)))

    def scales(self, buffer) -> None:
        """None: K and V are as they are."""
        del buffer

    def unit_of(self, index: jax.Array, units: int) -> jax.Array:
        """Which of a run's `units`, in the order of tokens, an operand's row `index` is."""
        if self.interleaves:
            inside = index % PAIRED_ROWS
            index = index - inside + inside % 2 * (PAIRED_ROWS // 2) + inside // 2
        if self.shifts == 1:
            return index
        alike = units // self.shifts
        shift = sum((index >= first).astype(jnp.int32) for first in range(alike, units, alike))
        return (index - shift * alike) * self.shifts + shift

    def token_of(self, index: jax.Array, place: jax.Array, units: int) -> jax.Array:
        """Which of a run's tokens is at `place` of row `index` of an operand of `units` rows."""
        return self.unit_of(index, units) * self.places.count + place

    @property
    def _unit_words(self) -> tuple[int, ...]:
        """Words of a unit in each plane."""
        return tuple(size * self.places.count for size in self.layout.token_words)

    def _load_head(self, buffer, head: int) -> tuple[list[jax.Array], list[jax.Array]]:
        """Tiles `[units, 128]` of K and of V of one head."""
        strips = [self._plane_tiles(buffer, head, plane) for plane in range(self.layout.planes)]
        if self.layout.dtype == "bfloat16":
            halves = [self._halves(words) for words in strips[0]]
            strips = [[low for low, _ in halves], [high for _, high in halves]]
        keys, values = self.joining.join(strips)
        return [self._operand(tile) for tile in keys], [self._operand(tile) for tile in values]

    def _plane_tiles(self, buffer, head: int, plane: int) -> list[jax.Array]:
        """Words `[units, 128]` of one plane of a head, a tile for each 128 words of a unit."""
        size = self._unit_words[plane]
        plane_row = self.layout.first_word(head, plane) // LANES
        stride = size * self.shifts // LANES
        count = self.page_units // self.shifts

        def rows_from(row: int) -> jax.Array:
            first = plane_row + row
            rows = slice(first, first + count) if stride == 1 else pl.ds(first, count, stride=stride)
            return buffer[:, rows].reshape(-1, LANES)

        def shifted(word: int, words: int) -> jax.Array:
            """The rows that begin at `word` of units that fill rows together; the first `words` matter."""
            row, lane = divmod(word, LANES)
            rows = rows_from(row)
            if lane == 0:
                return rows
            if lane + words > LANES:
                rows = jnp.where(_lanes_of(rows) < lane, rows_from(row + 1), rows)
            return pltpu.roll(rows, LANES - lane, 1)

        return [
            jnp.concatenate([shifted(unit * size + at, size - at) for unit in range(self.shifts)], axis=0)
            for at in range(0, size, LANES)
        ]

    def _halves(self, words: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The low and the high elements of bfloat16 words, each packed or as the bits of a float32."""
        if not self.interleaves:
            return words << 16, words & jnp.uint32(0xFFFF0000)
        tiles = words.reshape(-1, 2, PAIRED_ROWS // 2, LANES)
        even, odd = tiles[:, 0].reshape(-1, LANES), tiles[:, 1].reshape(-1, LANES)
        low = (even & jnp.uint32(0xFFFF)) | (odd << 16)
        return low, (even >> 16) | (odd & jnp.uint32(0xFFFF0000))

    def _operand(self, tile: jax.Array) -> jax.Array:
        return pltpu.bitcast(tile, jnp.bfloat16) if self.interleaves else float_of(tile).astype(self.dtype)


def start_copies(count: jax.Array, copy: Callable[[jax.Array], Any]) -> None:
    """Starts `copy(0)` to `copy(count - 1)`, several in one turn of the loop."""

    def start_several(turn, _):
        for index in range(UNROLLED_COPIES):
            copy(turn * UNROLLED_COPIES + index).start()

    whole = count // UNROLLED_COPIES
    lax.fori_loop(0, whole, start_several, None)
    lax.fori_loop(whole * UNROLLED_COPIES, count, lambda index, _: copy(index).start(), None)


def clear_run(
    buffer, layout: AttentionPageLayout, live: jax.Array, start: jax.Array, stop: jax.Array
) -> None:
    """Zeroes what is no token of [start, stop) in a run `[pages, rows, 128]` with `live` pages fetched.

    A weight of 0 does not hide a NaN, and a slot that nobody sees may hold one.
    """
    size = layout.block_size

    @pl.when(start > 0)
    def _():
        _clear_page(buffer.at[0], layout, start, stop)

    @pl.when(live * size > stop)
    def _():
        before = (live - 1) * size
        _clear_page(buffer.at[live - 1], layout, start - before, stop - before)

    def zero(page, _):
        buffer[page] = jnp.zeros(buffer.shape[1:], buffer.dtype)

    lax.fori_loop(live, buffer.shape[0], zero, None)


def _clear_page(page, layout: AttentionPageLayout, start: jax.Array, stop: jax.Array) -> None:
    """Zeroes the words of tokens outside [start, stop) of a page `[rows, 128]` in VMEM."""
    for head in range(layout.num_kv_heads):
        for plane, size in enumerate(
            layout.token_words[:KEY_SCALES] if layout.is_quantised else layout.token_words
        ):
            first = layout.first_word(head, plane) // LANES
            rows = slice(first, first + layout.block_size * size // LANES)
            word = _words_of(page[rows])
            page[rows] = jnp.where((word >= start * size) & (word < stop * size), page[rows], jnp.uint32(0))
    if layout.is_quantised:  # a row may have scales of several heads
        rows = slice(layout.first_word(0, KEY_SCALES) // LANES, layout.used_rows)
        token = _words_of(page[rows]) % layout.block_size
        page[rows] = jnp.where((token >= start) & (token < stop), page[rows], jnp.uint32(0))


def _words_of(x: jax.Array) -> jax.Array:
    """The number of each word of `x [rows, 128]`."""
    return lax.broadcasted_iota(jnp.int32, x.shape, 0) * LANES + _lanes_of(x)


def _lanes_of(x: jax.Array) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, x.shape, 1)
