"""The K and V operands of products, made from a run of pages in VMEM.

A row of 128 words holds one token of a head, a part of one (heads wider than 128) or several (narrower ones).
`rows` below are such rows of one head, in the order of tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES, AttentionPageLayout, float_of

PAIRED_ROWS = 16  # rows of one packed bfloat16 tile
SUBLANES = 8
UNROLLED_COPIES = 8


class Operands(NamedTuple):
    """K and V `[rows, heads * width]`, in the dtype of the products."""

    keys: jax.Array
    values: jax.Array


@dataclass(frozen=True)
class OperandLoader:
    """Loads operands of `layout`'s pages for products in `dtype` (bfloat16 or float32)."""

    layout: AttentionPageLayout
    dtype: jnp.dtype

    @property
    def parts(self) -> int:
        """Rows of 128 words that a token takes."""
        return max(self.layout.head_size // LANES, 1)

    @property
    def width(self) -> int:
        """Lanes of one head in an operand."""
        return self.parts * LANES

    @property
    def page_rows(self) -> int:
        """Operand rows of one page."""
        return self.layout.block_size * self.layout.head_size // self.width

    @property
    def interleaves(self) -> bool:
        """Whether two packed rows are made of rows 8 apart: cheaper than packing neighbours."""
        return self.layout.dtype == "bfloat16" and self.dtype == jnp.bfloat16

    @property
    def precision(self) -> lax.Precision | None:
        """Precision of the products."""
        return None if self.dtype == jnp.bfloat16 else lax.Precision.HIGHEST

    def load(self, buffer, first_head: int, heads: int) -> Operands:
        """Operands of some heads from `buffer [pages, rows, 128]`, heads side by side along lanes."""
        pairs = [
            self._load_part(buffer, first_head + head, part)
            for head in range(heads)
            for part in range(self.parts)
        ]
        return Operands(*(jnp.concatenate(side, axis=1) for side in zip(*pairs, strict=True)))

    def row_of(self, index: jax.Array) -> jax.Array:
        """Which of the run's rows, in the order of tokens, an operand's row `index` is."""
        if not self.interleaves:
            return index
        inside = index % PAIRED_ROWS
        return index - inside + inside % 2 * (PAIRED_ROWS // 2) + inside // 2

    def _load_part(self, buffer, head: int, part: int) -> Operands:
        words = [self._words(buffer, head, plane, part) for plane in range(self.layout.planes)]
        if self.layout.planes > 1:
            return Operands(*(float_of(plane).astype(self.dtype) for plane in words))
        if not self.interleaves:
            low, high = words[0] << 16, words[0] & jnp.uint32(0xFFFF0000)
            return Operands(float_of(low).astype(self.dtype), float_of(high).astype(self.dtype))
        tiles = words[0].reshape(-1, 2, PAIRED_ROWS // 2, LANES)
        even, odd = tiles[:, 0].reshape(-1, LANES), tiles[:, 1].reshape(-1, LANES)
        low = (even & jnp.uint32(0xFFFF)) | (odd << 16)
        high = (even >> 16) | (odd & jnp.uint32(0xFFFF0000))
        return Operands(pltpu.bitcast(low, jnp.bfloat16), pltpu.bitcast(high, jnp.bfloat16))

    def _words(self, buffer, head: int, plane: int, part: int) -> jax.Array:
        """Words `[rows, 128]` of one plane of a head."""
        size = self.page_rows
        row = (head * self.layout.planes + plane) * size * self.parts + part
        rows = slice(row, row + size) if self.parts == 1 else pl.ds(row, size, stride=self.parts)
        return buffer[:, rows].reshape(-1, LANES)


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
    row = lax.broadcasted_iota(jnp.int32, page.shape, 0)
    if layout.head_size >= LANES:
        token = row // (layout.head_size // LANES) % layout.block_size
    else:
        lane = lax.broadcasted_iota(jnp.int32, page.shape, 1)
        token = (row * (LANES // layout.head_size) + lane // layout.head_size) % layout.block_size
    page[...] = jnp.where((token >= start) & (token < stop), page[...], jnp.uint32(0))
