"""What a tile of queries sees of its sequence, and how it comes to shared memory: the kernels' common part.

A tile sees a run of positions, cut into chunks. A chunk is brought by copies of pieces, a piece being as many
tokens as divide both a page and a chunk; pieces that no query of the tile sees are not copied.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.numbers import numbers_of_words
from pallas_kernels.gpu.shared_memory import swizzled
from pallas_kernels.gpu.terms import FLOAT32_TERMS, terms_of
from pallas_kernels.gpu.token_words import Lanes, Place, Strip, lanes_in, rows_of_plane, strips_of
from pallas_kernels.layout import float_of
from pallas_kernels.settings import AttentionSettings

UNPACKED_ROWS = 32  # tokens at a time: with 128 words of each 32 registers a thread


class TileScalars(NamedTuple):
    """What steers a kernel, int32 in device memory.

    layer_slot `[1]`; seq, position, num_queries `[N]`: the tiles' schedule; first_block `[S]`; block_ids
    `[S, W]`.
    """

    layer_slot: jax.Array
    seq: jax.Array
    position: jax.Array
    num_queries: jax.Array
    first_block: jax.Array
    block_ids: jax.Array


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """Static sizes: tokens of a chunk, and how many buffers its words have."""

    settings: AttentionSettings
    chunk: int
    stages: int

    @property
    def piece(self) -> int:
        """Tokens of one copy."""
        return math.gcd(self.settings.layout.block_size, self.chunk)

    @property
    def pieces(self) -> int:
        """Pieces of a chunk."""
        return self.chunk // self.piece

    @property
    def lanes(self) -> Lanes:
        """Elements of the arrays' swizzled rows."""
        lanes = lanes_in(self.settings.layout)
        assert lanes is not None  # refused otherwise
        return lanes

    def views(self, pages: jax.Array) -> tuple[jax.Array, ...]:
        """The pool as each plane is read: rows of one token's words, or as words where a token has one."""
        words = self.settings.layout.token_words
        return tuple(
            pages.reshape(pages.shape[0], -1, size) if size > 1 else pages.reshape(pages.shape[0], -1)
            for size in words
        )

    def buffers(self) -> tuple[Any, ...]:
        """Shared memory for the words of chunks, `uint32[stages, chunk, words of a token]` for each plane."""
        lead = (self.stages, self.chunk)
        return tuple(
            swizzled((*lead, size), jnp.uint32, lanes) if size > 1 else plgpu.SMEM(lead, jnp.uint32)
            for size, lanes in zip(self.settings.layout.token_words, self.lanes.words, strict=True)
        )

    def barriers(self) -> Any:
        """One barrier for each buffer."""
        copies = self.pieces * self.settings.layout.planes
        return plgpu.Barrier(num_barriers=self.stages, num_arrivals=copies)


class TileView(NamedTuple):
    """Int32 scalars of a tile.

    seq, position, num_queries: its schedule; start, stop: the positions [start, stop) that it sees; first,
    last: the pieces [first, last) that hold them, counted from the sequence's first token; chunks: how many
    chunks these make.
    """

    seq: jax.Array
    position: jax.Array
    num_queries: jax.Array
    start: jax.Array
    stop: jax.Array
    first: jax.Array
    last: jax.Array
    chunks: jax.Array

    @classmethod
    def read(cls, scalars: TileScalars, tile: jax.Array, chunking: Chunking) -> "TileView":
        """The view of tile number `tile`; no pieces where it has no queries."""
        position, num_queries = scalars.position[tile], scalars.num_queries[tile]
        start, stop = chunking.settings.first_visible(position), position + num_queries
        piece = jnp.int32(chunking.piece)
        first = lax.div(start, piece)
        last = jnp.where(num_queries > 0, pl.cdiv(stop, piece), first)
        chunks = pl.cdiv(last - first, jnp.int32(chunking.pieces))
        return cls(scalars.seq[tile], position, num_queries, start, stop, first, last, chunks)

    def chunk_start(self, index: jax.Array, chunking: Chunking) -> jax.Array:
        """Position of the first token of chunk number `index`."""
        return (self.first + index * chunking.pieces) * chunking.piece


class Scales(NamedTuple):
    """What the 8-bit K and V of each token of a chunk are multiplied by, float32 `[chunk]`."""

    keys: jax.Array
    values: jax.Array


@dataclass(frozen=True, kw_only=True)
class PageStream:
    """The chunks of one tile and KV head; `scalars` and the references are a kernel's.

    `views` and `buffers` have one for each plane.
    """

    chunking: Chunking
    view: TileView
    head: jax.Array
    scalars: TileScalars
    views: tuple[Any, ...]
    buffers: tuple[Any, ...]
    barriers: Any

    def fetch(self, index: jax.Array, slot: jax.Array) -> None:
        """Starts the copies of chunk number `index` to buffer `slot`; its barrier counts every piece."""
        chunking, settings = self.chunking, self.chunking.settings
        layout, piece_tokens = settings.layout, chunking.piece
        pieces_of_page = jnp.int32(layout.block_size // piece_tokens)
        first_block = self.scalars.first_block[self.view.seq]
        layer_slot = self.scalars.layer_slot[0]
        for part in range(chunking.pieces):
            piece = self.view.first + index * chunking.pieces + part

            @pl.when(piece < self.view.last)
            def _(part=part, piece=piece):
                entry = lax.div(piece, pieces_of_page) - first_block
                page = self.scalars.block_ids[self.view.seq, entry] * settings.layer_slots + layer_slot
                offset = lax.rem(piece, pieces_of_page) * piece_tokens
                for plane, (view, buffer) in enumerate(zip(self.views, self.buffers, strict=True)):
                    rows = rows_of_plane(layout, plane)
                    assert rows is not None  # refused otherwise
                    plgpu.copy_gmem_to_smem(
                        view.at[page, pl.ds(rows.first + self.head * rows.step + offset, piece_tokens)],
                        buffer.at[slot, pl.ds(part * piece_tokens, piece_tokens)],
                        self.barriers.at[slot],
                    )

            @pl.when(piece >= self.view.last)
            def _():
                for _ in self.buffers:
                    plgpu.barrier_arrive(self.barriers.at[slot])

    def unpack(self, index: jax.Array, slot: jax.Array, keys_smem: Any, values_smem: Any) -> None:
        """K and V of chunk number `index`, in buffer `slot`, as bfloat16 terms `[terms, chunk, D]`.

        Both are 0 outside what the tile sees: a weight of 0 would not hide a NaN of V there. Latents have no
        `values_smem`. Scales are left out.
        """
        layout, lanes = self.chunking.settings.layout, self.chunking.lanes
        start = self.view.chunk_start(index, self.chunking)
        for begin in range(0, self.chunking.chunk, UNPACKED_ROWS):
            tokens = pl.ds(begin, UNPACKED_ROWS)
            for strip in strips_of(layout):
                width = lanes.words[strip.plane]
                for columns in strip.pieces(width):
                    shape = (UNPACKED_ROWS, columns.stop - columns.start)
                    copied = plgpu.Layout.SMEM_GMEM_COPY(shape, jnp.uint32, 4 * width)
                    at = pl.ds(columns.start, shape[1])
                    words = plgpu.load(self.buffers[strip.plane].at[slot, tokens, at], layout=copied)
                    token = start + begin + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=copied)
                    words = jnp.where(self._is_live(token), words, jnp.uint32(0))
                    for place, terms in self._numbers(strip, words):
                        ref = values_smem if place.of_values else keys_smem
                        target = pl.ds(place.first + columns.start - strip.begin, shape[1])
                        for term, part in enumerate(terms):
                            ref[term, tokens, target] = part

    def _numbers(self, strip: Strip, words: jax.Array) -> list[tuple[Place, list[jax.Array]]]:
        """The numbers of a strip's words as terms, and where they go."""
        if strip.high is None:
            return [(strip.low, terms_of(float_of(words), FLOAT32_TERMS))]
        numbers = numbers_of_words(words, self.chunking.settings.layout.dtype, strip.byte)
        return [(strip.low, [numbers.low]), (strip.high, [numbers.high])]

    def _is_live(self, token: jax.Array) -> jax.Array:
        """Whether some query of the tile sees the token at a position."""
        return (token >= self.view.start) & (token < self.view.stop)

    def scales(self, index: jax.Array, slot: jax.Array, layout: Any) -> Scales:
        """Of chunk number `index`, in buffer `slot`, in registers of `layout`.

        V's are 0 outside what the tile sees.
        """
        keys, values = (float_of(plgpu.load(buffer.at[slot], layout=layout)) for buffer in self.buffers[1:])
        start = self.view.chunk_start(index, self.chunking)
        token = start + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
        return Scales(keys, jnp.where(self._is_live(token), values, 0.0))
