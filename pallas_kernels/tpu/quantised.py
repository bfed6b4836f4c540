"""Operands of products from pages of 8-bit numbers, and the scales that belong to them.

Numbers go to the matrix unit as they are: it takes float8 beside bfloat16, and int8 is widened on the way. A
scale is one number for a token, so those of K multiply scores and those of V multiply weights.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES, AttentionPageLayout, float_of
from pallas_kernels.tpu.halved_places import HalvedPlaces
from pallas_kernels.tpu.operands import SUBLANES, Operands
from pallas_kernels.tpu.places import Places

PACKED_ROWS = 32  # rows of one packed 8-bit tile
SMALLEST_HEAD = 64
_KEYS, _VALUES = 1, 2  # planes of scales


class Scales(NamedTuple):
    """Of K and V: for each place, float32 `[heads, units]`, in the order of an operand's rows."""

    keys: list[jax.Array]
    values: list[jax.Array]


@dataclass(frozen=True)
class QuantisedLoader:
    """Like `OperandLoader`, for pages of 8-bit numbers whose blocks are whole rows of scales."""

    layout: AttentionPageLayout
    dtype: jnp.dtype
    apart: bool = False

    @cached_property
    def places(self) -> Places:
        """The places of a unit's tokens in its row."""
        return Places(self.layout.head_size, 1) if self.sets_apart else HalvedPlaces.of(self.layout)

    @property
    def sets_apart(self) -> bool:
        """Whether the two tokens of a row get operand rows of their own."""
        return self.apart and self.layout.head_size == LANES

    @property
    def row_tokens(self) -> int:
        """Tokens that share a row of 128 words."""
        return max(2 * LANES // self.layout.head_size, 1)

    @property
    def refuses(self) -> str | None:
        """Why pages of this layout cannot be loaded, or None."""
        size, block_size = self.layout.head_size, self.layout.block_size
        if size < SMALLEST_HEAD or max(size, 2 * LANES) % min(size, 2 * LANES):
            return f"heads of {size} in 8 bits are neither {SMALLEST_HEAD}, 128 nor multiples of 256"
        if block_size % LANES:
            return f"block_size {block_size} in 8 bits is not a multiple of {LANES}, a row of scales"
        return None

    @property
    def key_width(self) -> int:
        """Lanes of one head of K."""
        return self.places.width

    @property
    def value_width(self) -> int:
        """Lanes of one head of V."""
        return self.places.width

    @property
    def result_width(self) -> int:
        """Lanes of a result, once places are merged."""
        return max(self.layout.head_size, LANES)

    @property
    def page_units(self) -> int:
        """Units of one page."""
        return self.layout.block_size // self.places.count

    @property
    def shifts(self) -> int:
        """Units that fill whole rows together."""
        return 2 if self.sets_apart else 1

    @property
    def precision(self) -> lax.Precision | None:
        """Precision of the products."""
        return None if self.dtype == jnp.bfloat16 else lax.Precision.HIGHEST

    def load(self, buffer, first_head: int, heads: int) -> Operands:
        """Operands of some heads from `buffer [pages, rows, 128]`, heads side by side along lanes."""
        keys, values = [], []
        for head in range(first_head, first_head + heads):
            tiles = [self._bytes_apart(words) for words in self._words(buffer, head)]
            if self.sets_apart:
                keys.append(self._operand(_tokens_apart(*tiles[0][:2])))
                values.append(self._operand(_tokens_apart(*tiles[0][2:])))
                continue
            for byte, side in enumerate((keys, keys, values, values)):
                side += [self._operand(tile[byte]) for tile in tiles]
        return Operands(jnp.concatenate(keys, axis=1), jnp.concatenate(values, axis=1))

    def scales(self, buffer, first_head: int, heads: int) -> Scales:
        """The scales of the same heads."""
        return Scales(
            self._scales_of_plane(buffer, first_head, heads, _KEYS),
            self._scales_of_plane(buffer, first_head, heads, _VALUES),
        )

    def unit_of(self, index: jax.Array, units: int) -> jax.Array:
        """Which of a run's `units`, in the order of tokens, an operand's row `index` is."""
        if not self.sets_apart:
            return _row_of(index)
        second = index >= units // 2
        row = _row_of(jnp.where(second, index - units // 2, index))
        return 2 * row + second.astype(jnp.int32)

    def _words(self, buffer, head: int) -> list[jax.Array]:
        """Words `[units, 128]` of a head, a tile for each 128 words of a unit."""
        parts = max(self.layout.head_size // 2 // LANES, 1)
        page_rows = self.layout.block_size // self.row_tokens
        first = self.layout.first_word(head, 0) // LANES
        rows = [
            slice(first, first + page_rows) if parts == 1 else pl.ds(first + part, page_rows, stride=parts)
            for part in range(parts)
        ]
        return [buffer[:, of_part].reshape(-1, LANES) for of_part in rows]

    def _bytes_apart(self, words: jax.Array) -> list[jax.Array]:
        """The bytes of `words [units, 128]`, each packed `uint32[units / 4, 128]` of rows 8 apart."""
        tiles = words.reshape(-1, 4, SUBLANES, LANES)
        one, two, three, four = (tiles[:, row].reshape(-1, LANES) for row in range(4))
        low_half, high_half = jnp.uint32(0x0000FFFF), jnp.uint32(0xFFFF0000)
        even, odd = jnp.uint32(0x00FF00FF), jnp.uint32(0xFF00FF00)
        apart = []
        for first, second in (
            ((one & low_half) | (three << 16), (two & low_half) | (four << 16)),
            ((one >> 16) | (three & high_half), (two >> 16) | (four & high_half)),
        ):
            apart += [(first & even) | ((second << 8) & odd), ((first >> 8) & even) | (second & odd)]
        return apart

    def _operand(self, packed: jax.Array) -> jax.Array:
        numbers = pltpu.bitcast(packed, jnp.dtype(self.layout.dtype))
        mixed = self.dtype == jnp.bfloat16 and numbers.dtype == jnp.float8_e4m3fn
        return numbers if mixed else numbers.astype(self.dtype)

    def _scales_of_plane(self, buffer, first_head: int, heads: int, plane: int) -> list[jax.Array]:
        """For each place, the scales `[heads, units]` of some heads, 128 columns after another."""
        count = self.row_tokens
        units = buffer.shape[0] * self.layout.block_size // count
        tiles = []
        for first in range(0, units, LANES):
            columns = min(LANES, units - first)
            sources = [
                self._scale_rows(buffer, first_head, heads, plane, (first * count) // LANES + source)
                for source in range(columns * count // LANES)
            ]
            tiles.append([self._in_unit_order(sources, place)[:, :columns] for place in range(count)])
        by_place = [jnp.concatenate(of_place, axis=1)[:heads] for of_place in zip(*tiles, strict=True)]
        return [jnp.concatenate(by_place, axis=1)] if self.sets_apart else by_place

    def _scale_rows(self, buffer, first_head: int, heads: int, plane: int, row: int) -> jax.Array:
        """Row number `row` of 128 tokens of a run: their scales `[heads, 128]`, a single head repeated."""
        page_rows = self.layout.block_size // LANES
        page, row_of_page = divmod(row, page_rows)
        first = self.layout.first_word(first_head, plane) // LANES + row_of_page
        if heads > 1:
            return float_of(buffer[page, pl.ds(first, heads, stride=page_rows)])
        return jnp.broadcast_to(float_of(buffer[page, pl.ds(first, 1)]), (SUBLANES, LANES))

    def _in_unit_order(self, sources: list[jax.Array], place: int) -> jax.Array:
        """Scales of the tokens at one place of 128 units, from rows in the order of tokens."""
        lane = lax.broadcasted_iota(jnp.int32, sources[0].shape, 1)
        token = _row_of(lane) * self.row_tokens + place
        found = jnp.take_along_axis(sources[0], token % LANES, axis=1)
        for index, source in enumerate(sources[1:], start=1):
            other = jnp.take_along_axis(source, token % LANES, axis=1)
            found = jnp.where(token // LANES == index, other, found)
        return found


def _row_of(index: jax.Array) -> jax.Array:
    """Which row of words row `index` of a packed operand comes from."""
    inside = index % PACKED_ROWS
    return index - inside + inside % 4 * SUBLANES + inside // 4


def _tokens_apart(first_halves: jax.Array, second_halves: jax.Array) -> jax.Array:
    """Packed rows of all first tokens of rows, then of all second ones, from both halves of heads of 128."""
    lane = lax.broadcasted_iota(jnp.int32, first_halves.shape, 1)
    half = LANES // 2
    first = jnp.where(lane < half, first_halves, pltpu.roll(second_halves, half, 1))
    second = jnp.where(lane < half, pltpu.roll(first_halves, half, 1), second_halves)
    return jnp.concatenate([first, second], axis=0)
