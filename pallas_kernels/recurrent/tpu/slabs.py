"""Moving a state's words between the pool and VMEM, a slab of rows at a time."""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES, float_of, unpack_pair
from pallas_kernels.recurrent.state_place import StatePlace

TOGETHER = 16
"""Copies that are started one after the other without a loop."""


class StatePages(NamedTuple):
    """States in SMEM, int32: state i has pages `ids[i * num_pages + k]` and is real where `live[i]` is 1."""

    ids: jax.Array
    live: jax.Array


def state_pages(blocks: jax.Array, wanted: jax.Array, place: StatePlace) -> StatePages:
    """The states in `blocks` `[..., P]`, real where `wanted` `[...]` and the first block is not 0."""
    live = (wanted & (blocks[..., 0] != 0)).astype(jnp.int32)
    return StatePages(place.page_ids(blocks).reshape(-1).astype(jnp.int32), live.reshape(-1))


@dataclass(frozen=True, kw_only=True)
class SlabPlan:
    """A part in `num_slabs` slabs of `rows` rows of 128 words, from row `first_row` of its pages on."""

    first_row: int
    num_slabs: int
    rows: int
    page_rows: int
    num_pages: int

    @classmethod
    def of(cls, place: StatePlace, num_slabs: int) -> "SlabPlan":
        """The part in `num_slabs` slabs; it must be whole rows that divide into so many."""
        return cls(
            first_row=place.words.start // LANES,
            num_slabs=num_slabs,
            rows=place.words.size // LANES // num_slabs,
            page_rows=place.layout.page_rows,
            num_pages=place.layout.num_pages,
        )

    @property
    def piece(self) -> int:
        """Rows of one copy: the most that never cross a page's end, wherever the slab begins."""
        if self.num_slabs == 1 and self.first_row % self.page_rows + self.rows <= self.page_rows:
            return self.rows
        return gcd(self.first_row, self.rows, self.page_rows)

    def _copy(self, index, pages_ref, states, state, slab, buffer, semaphore, to_pool):
        """The copy of piece number `index` of a slab."""
        ids_ref, _ = states
        row = self.first_row + index * self.piece
        page, in_slab = state * self.num_pages, slab * self.rows
        if self.rows % self.page_rows == 0:
            page += row // self.page_rows + slab * (self.rows // self.page_rows)
        else:
            row += in_slab
            page += row // self.page_rows
        in_page = pages_ref.at[ids_ref[page], pl.ds(row % self.page_rows, self.piece)]
        here = buffer.at[pl.ds(index * self.piece, self.piece)]
        source, target = (here, in_page) if to_pool else (in_page, here)
        return pltpu.make_async_copy(source, target, semaphore)

    def start(self, pages_ref, states, state, slab, buffer, semaphore, *, to_pool: bool) -> None:
        """Starts the copies of a slab into `buffer` `[rows, 128]`, or of it into the pool, if it is real."""

        def some(turn, _):
            for index in range(together):
                self._copy(
                    turn * together + index, pages_ref, states, state, slab, buffer, semaphore, to_pool
                ).start()

        pieces = self.rows // self.piece
        together = gcd(pieces, TOGETHER)

        @pl.when(states.live[state] == 1)
        def _():
            if pieces == together:
                some(0, None)
            else:
                lax.fori_loop(0, pieces // together, some, None)

    def clear(self, states, state, buffer) -> None:
        """Zeroes `buffer` for a state that is not real."""

        @pl.when(states.live[state] == 0)
        def _():
            buffer[...] = jnp.zeros_like(buffer)

    def wait(self, states, state, buffer, semaphore) -> None:
        """Waits for what `start` has started: a wait counts bytes, so one does for all pieces."""

        @pl.when(states.live[state] == 1)
        def _():
            pltpu.make_async_copy(buffer, buffer, semaphore).wait()


def unpack_rows(words, packed: bool, half: int) -> jax.Array:
    """float32 of words; of the low (0) or high (1) halves where two bfloat16 are packed in one."""
    return unpack_pair(words)[half] if packed else float_of(words)


def pack_rows(values: list[jax.Array], packed: bool) -> jax.Array:
    """Words of one float32 array, or of two as bfloat16: the inverse of `unpack_rows`."""
    bits = [lax.bitcast_convert_type(value, jnp.uint32) for value in values]
    if not packed:
        return bits[0]
    # Rounded to the nearest, ties to even, by carrying into the upper half.
    low, high = (b + jnp.uint32(0x7FFF) + ((b >> 16) & jnp.uint32(1)) for b in bits)
    return (low >> 16) | (high & jnp.uint32(0xFFFF0000))
