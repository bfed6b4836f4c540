"""Operands of products from pages of 8-bit numbers, and the scales that belong to them.

Numbers go to the matrix unit as they are where it takes float8 beside bfloat16, else they are widened on the
way. A scale is one number for a token, so those of K multiply scores and those of V multiply weights.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES
from pallas_kernels.tpu.chip import float8_of_matrix_unit
from pallas_kernels.tpu.halved_places import HalvedPlaces
from pallas_kernels.tpu.operands import SUBLANES, Operands
from pallas_kernels.tpu.page_loader import PageLoader
from pallas_kernels.tpu.places import Places
from pallas_kernels.tpu.scale_rows import ScaleRows

PACKED_ROWS = 32  # rows of one packed 8-bit tile
SMALLEST_HEAD = 64
SMALLER_BY = 16.0  # an exponent's bias of 11, of 7 in float8_e4m3fn
BLOCKS_BELOW_A_ROW = (16, 32, 64)  # of pages whose scales share rows


class Scales(NamedTuple):
    """Of K and V: for each place, float32 `[all heads, units]`, in the order of an operand's rows."""

    keys: list[jax.Array]
    values: list[jax.Array]


@dataclass(frozen=True)
class QuantisedLoader(PageLoader):
    """The loader of pages of 8-bit numbers; `apart` as in `loader_of`."""

    apart: bool = False

    @cached_property
    def places(self) -> Places:
        """The places of a unit's tokens in its row."""
        size = self.layout.head_size
        return Places(size, LANES // size) if self.sets_apart else HalvedPlaces.of(self.layout)

    @property
    def sets_apart(self) -> bool:
        """Whether a row's even and odd tokens get operand rows of their own, their halves put together.

        Always for heads of 64, which would else have four places, and four times the rows of q.
        """
        return self.layout.head_size == LANES // 2 or (self.apart and self.layout.head_size == LANES)

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
        if block_size % LANES and block_size not in BLOCKS_BELOW_A_ROW:
            return (
                f"block_size {block_size} in 8 bits is none of {BLOCKS_BELOW_A_ROW} or whole rows of {LANES}"
            )
        return None

    @property
    def value_width(self) -> int:
        """Lanes of one head of V."""
        return self.places.width

    @property
    def result_width(self) -> int:
        """Lanes of a result, once places are merged."""
        return max(self.layout.head_size, LANES)

    @property
    def whole_pages(self) -> int:
        """Pages whose operands and scales are whole tiles together."""
        return self.scale_rows.pages

    @cached_property
    def scale_rows(self) -> ScaleRows:
        """Where the scales are."""
        return ScaleRows(self.layout)

    @property
    def shifts(self) -> int:
        """Units that fill whole rows together."""
        return 2 if self.sets_apart else 1

    @cached_property
    def _float8(self) -> jnp.dtype | None:
        """What the matrix unit takes numbers as; None where they are widened."""
        is_float8 = self.layout.dtype == "float8_e4m3fn"
        return float8_of_matrix_unit() if is_float8 and self.dtype == jnp.bfloat16 else None

    @property
    def operand_dtype(self) -> jnp.dtype:
        """Of operands in products, beside q and weights in `dtype`."""
        return self.dtype if self._float8 is None else self._float8

    def load(self, buffer, first_head: int, heads: int) -> Operands:
        """Operands of some heads from `buffer [pages, rows, 128]`, heads side by side along lanes."""
        keys, values = [], []
        for head in range(first_head, first_head + heads):
            tiles = [self._bytes_apart(words) for words in self._words(buffer, head)]
            if self.sets_apart:
                keys.append(self._operand(self._tokens_apart(*tiles[0][:2])))
                values.append(self._operand(self._tokens_apart(*tiles[0][2:])))
                continue
            for byte, side in enumerate((keys, keys, values, values)):
                side += [self._operand(tile[byte]) for tile in tiles]
        return Operands(jnp.concatenate(keys, axis=1), jnp.concatenate(values, axis=1))

    def scales(self, buffer) -> Scales:
        """The scales of all heads in a run `[pages, rows, 128]`, for numbers as operands have them."""
        count, heads = self.row_tokens, self.layout.num_kv_heads
        rows = buffer.shape[0] * self.layout.block_size // count
        tiles = []
        for first in range(0, rows, LANES):
            columns = min(LANES, rows - first)
            sources = [
                self.scale_rows.load(buffer, first * count // LANES + source)
                for source in range(columns * count // LANES)
            ]
            tiles.append([self._in_row_order(sources, token)[:, :columns] for token in range(count)])
        found = [jnp.concatenate(of_token, axis=1) for of_token in zip(*tiles, strict=True)]
        if self.sets_apart:
            found = [jnp.concatenate(pair, axis=1) for pair in zip(found[::2], found[1::2], strict=True)]
        if self._float8 == jnp.float8_e4m3b11fnuz:
            found = [both * SMALLER_BY for both in found]
        return Scales([both[:heads] for both in found], [both[heads:] for both in found])

    def token_of(self, index: jax.Array, place: jax.Array, units: int) -> jax.Array:
        """Which of a run's tokens is at `place` of row `index` of an operand of `units` rows."""
        if not self.sets_apart:
            return _row_of(index) * self.row_tokens + place
        odd = index >= units // 2
        row = _row_of(jnp.where(odd, index - units // 2, index))
        return row * self.row_tokens + 2 * place + odd.astype(jnp.int32)

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

    def _tokens_apart(self, first_halves: jax.Array, second_halves: jax.Array) -> jax.Array:
        """Packed rows of all even tokens of rows, then of all odd ones, from both halves of heads."""
        half = self.layout.head_size // 2
        is_even = lax.broadcasted_iota(jnp.int32, first_halves.shape, 1) // half % 2 == 0
        even = jnp.where(is_even, first_halves, pltpu.roll(second_halves, half, 1))
        odd = jnp.where(is_even, pltpu.roll(first_halves, LANES - half, 1), second_halves)
        return jnp.concatenate([even, odd], axis=0)

    def _operand(self, packed: jax.Array) -> jax.Array:
        float8 = self._float8
        numbers = pltpu.bitcast(packed, jnp.dtype(self.layout.dtype) if float8 is None else float8)
        return numbers.astype(self.operand_dtype)

    def _in_row_order(self, sources: list[jax.Array], first: int) -> jax.Array:
        """Scales of token number `first` of each of 128 rows, from rows in the order of tokens."""
        lane = lax.broadcasted_iota(jnp.int32, sources[0].shape, 1)
        token = _row_of(lane) * self.row_tokens + first
        lane_of_token = self.scale_rows.lane_of(token)
        found = jnp.take_along_axis(sources[0], lane_of_token, axis=1)
        for index, source in enumerate(sources[1:], start=1):
            other = jnp.take_along_axis(source, lane_of_token, axis=1)
            found = jnp.where(token // LANES == index, other, found)
        return found


def _row_of(index: jax.Array) -> jax.Array:
    """Which row of words row `index` of a packed operand comes from."""
    inside = index % PACKED_ROWS
    return index - inside + inside % 4 * SUBLANES + inside // 4
