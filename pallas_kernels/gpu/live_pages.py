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

from pallas_kernels.gpu.shared_memory import swizzled
from pallas_kernels.gpu.terms import terms_of_words
from pallas_kernels.settings import AttentionSettings

UNPACKED_WORDS = 4096  # at a time: 32 registers a thread
COPY_SWIZZLE = 128  # bytes


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

    def buffers(self) -> Any:
        """Shared memory for the words of chunks, `uint32[stages, planes, chunk, D]`."""
        layout = self.settings.layout
        return swizzled((self.stages, layout.planes, self.chunk, layout.head_size), jnp.uint32)

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


@dataclass(frozen=True, kw_only=True)
class PageStream:
    """The chunks of one tile and KV head; `scalars` and the references are a kernel's."""

    chunking: Chunking
    view: TileView
    head: jax.Array
    scalars: TileScalars
    pages: Any
    buffers: Any
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
                for plane in range(layout.planes):
                    row = (self.head * layout.planes + plane) * layout.block_size + offset
                    plgpu.copy_gmem_to_smem(
                        self.pages.at[page, pl.ds(row, piece_tokens)],
                        self.buffers.at[slot, plane, pl.ds(part * piece_tokens, piece_tokens)],
                        self.barriers.at[slot],
                    )

            @pl.when(piece >= self.view.last)
            def _():
                for _ in range(layout.planes):
                    plgpu.barrier_arrive(self.barriers.at[slot])

    def unpack(self, index: jax.Array, slot: jax.Array, keys_smem: Any, values_smem: Any) -> None:
        """K and V of chunk number `index`, in buffer `slot`, as bfloat16 terms `[terms, chunk, D]`.

        V is 0 outside what the tile sees.
        """
        layout = self.chunking.settings.layout
        _, chunk, head_size = keys_smem.shape
        size = chunk
        while size * head_size > UNPACKED_WORDS:
            size //= 2
        copied = plgpu.Layout.SMEM_GMEM_COPY((size, head_size), jnp.uint32, COPY_SWIZZLE)
        start = self.view.chunk_start(index, self.chunking)
        for begin in range(0, chunk, size):
            at = pl.ds(begin, size)
            planes = [plgpu.load(self.buffers.at[slot, p, at], layout=copied) for p in range(layout.planes)]
            token = start + begin + plgpu.broadcasted_iota(jnp.int32, planes[0].shape, 0, layout=copied)
            live = (token >= self.view.start) & (token < self.view.stop)
            keys, values = terms_of_words(planes, live, layout)
            for parts, ref in ((keys, keys_smem), (values, values_smem)):
                for term, part in enumerate(parts):
                    ref[term, at] = part
