"""A decode's new token on its way into the pool: put into its page in VMEM, whose rows then go back.

A row of 128 words is the least that is copied. Where tokens share rows, those that fill whole rows together
are a set (`SharedRows`): the new token is mixed with the others of its set as they were fetched.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES, AttentionPageLayout
from pallas_kernels.tpu.neighbours import SharedRows


class Piece(NamedTuple):
    """The rows of one head and plane: from row `image` of an image on, from row `page` of a page on."""

    shared: SharedRows
    image: int
    page: int

    def rows_of_image(self) -> Any:
        """The rows in an image."""
        return pl.ds(self.image, self.shared.rows)

    def rows_of_page(self, slot: jax.Array) -> Any:
        """The rows of a page that hold the token at `slot`."""
        return pl.ds(self.page + slot // self.shared.neighbours * self.shared.rows, self.shared.rows)


@dataclass(frozen=True)
class NewRows:
    """The rows that one token's words are in, of all heads and planes; an image is those rows."""

    layout: AttentionPageLayout

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All heads of the first plane, then of the next one."""
        pieces, image = [], 0
        for plane in range(self.layout.planes):
            shared = SharedRows(self.layout, plane)
            for head in range(self.layout.num_kv_heads):
                pieces.append(Piece(shared, image, shared.first_row(head)))
                image += shared.rows
        return tuple(pieces)

    @property
    def count(self) -> int:
        """Rows of an image."""
        return sum(piece.shared.rows for piece in self.pieces)

    @property
    def are_mixed(self) -> bool:
        """Whether tokens share some of the rows."""
        return not self.layout.rows_are_whole

    def images(self, planes: Sequence[jax.Array]) -> jax.Array:
        """`uint32[T, count, 128]` of the words of tokens, `uint32[T, Hkv, W]` for each plane.

        Each token is at every place where it could be: it is mixed by its place alone.
        """
        tiled = (
            jnp.tile(words, (1, 1, SharedRows(self.layout, plane).neighbours))
            for plane, words in enumerate(planes)
        )
        return jnp.concatenate([words.reshape(words.shape[0], -1, LANES) for words in tiled], axis=1)

    def put(self, image, page, slot: jax.Array, mixed) -> None:
        """Puts a token's `image [count, 128]` into its `page [rows, 128]`, and the rows into `mixed` too.

        All are refs in VMEM; `mixed` is None where tokens share no rows.
        """
        for piece in self.pieces:
            rows = piece.rows_of_page(slot)
            words = image[piece.rows_of_image()]
            if mixed is not None:
                size = piece.shared.token_words
                begin = slot % piece.shared.neighbours * size
                row, lane = (lax.broadcasted_iota(jnp.int32, words.shape, axis) for axis in (0, 1))
                word = row * LANES + lane
                words = jnp.where((word >= begin) & (word < begin + size), words, page[rows])
                mixed[piece.rows_of_image()] = words
            page[rows] = words


class RowWriter(NamedTuple):
    """Writes the new tokens of a grid step's sequences, by refs in VMEM and one semaphore.

    images, mixed `[sequences, rows.count, 128]`: what is new, and room for what is written where tokens share
    rows (else None).
    """

    rows: NewRows
    images: Any
    mixed: Any
    semaphore: Any

    def start(self, index: jax.Array, fetched, page, slot: jax.Array) -> None:
        """Puts a sequence's token into its `fetched` page, and starts the copies to `page` of the pool."""
        mixed = None if self.mixed is None else self.mixed.at[index]
        image = self.images.at[index]
        self.rows.put(image, fetched, slot, mixed)
        source = image if mixed is None else mixed
        for piece in self.rows.pieces:
            pltpu.make_async_copy(
                source.at[piece.rows_of_image()], page.at[piece.rows_of_page(slot)], self.semaphore
            ).start()

    def wait(self, count: jax.Array) -> None:
        """Waits for the copies of `count` tokens."""
        live = self.images.at[pl.ds(0, count)]  # of any rows: a wait counts bytes
        pltpu.make_async_copy(live, live, self.semaphore).wait()
