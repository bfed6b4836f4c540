"""A decode's new token on its way into the pool: put into its page in VMEM, whose rows then go back.

A row of 128 words is the least that is copied. Where tokens share rows, those that fill whole rows together
are a set (`SharedRows`): the new token is mixed with the others of its set as they were fetched.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES, AttentionPageLayout
from pallas_kernels.tpu.neighbours import SharedRows, shares_of, words_of_shares


class Piece(NamedTuple):
    """The rows of a set in one piece of `shared`: from row `image` of an image on, and of the first set of a
    page from its row `page` on.
    """

    shared: SharedRows
    image: int
    page: int

    def rows_of_image(self) -> Any:
        """The rows in an image."""
        return pl.ds(self.image, self.shared.rows)

    def rows_of_page(self, first: jax.Array, sets: int | jax.Array = 1) -> Any:
        """The rows of a page with some sets from number `first` on."""
        return pl.ds(self.page + first * self.shared.rows, sets * self.shared.rows)


@dataclass(frozen=True)
class NewRows:
    """The rows that one token's words are in, of all heads and planes; an image is those rows."""

    layout: AttentionPageLayout

    @cached_property
    def shares(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces of each of `shares_of`; an image has the first one's, then the next one's."""
        shares, image = [], 0
        for shared in shares_of(self.layout):
            pieces = range(shared.pieces)
            shares.append(
                tuple(Piece(shared, image + piece * shared.rows, shared.first_row(piece)) for piece in pieces)
            )
            image += len(pieces) * shared.rows
        return tuple(shares)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All of them."""
        return tuple(chain(*self.shares))

    @property
    def count(self) -> int:
        """Rows of an image."""
        return sum(piece.shared.rows for piece in self.pieces)

    @property
    def are_mixed(self) -> bool:
        """Whether tokens share some of the rows."""
        return any(piece.shared.neighbours > 1 for piece in self.pieces)

    def images(self, k: jax.Array, v: jax.Array | None) -> jax.Array:
        """`uint32[T, count, 128]` of tokens, as `pack_tokens` takes them.

        Each token is at every place where it could be: it is mixed by its place alone.
        """
        tokens, images = k.shape[0], []
        for shared, words in zip(shares_of(self.layout), words_of_shares(self.layout, k, v), strict=True):
            everywhere = jnp.repeat(words[:, None], shared.neighbours, axis=1)
            rows = shared.images(everywhere).reshape(shared.pieces, tokens, shared.rows, LANES)
            images.append(rows.swapaxes(0, 1).reshape(tokens, -1, LANES))
        return jnp.concatenate(images, axis=1)

    def put(self, image, page, slot: jax.Array, mixed) -> None:
        """Puts a token's `image [count, 128]` into its `page [rows, 128]`, and the rows into `mixed` too.

        All are refs in VMEM; `mixed` is None where tokens share no rows.
        """
        for piece in self.pieces:
            size = piece.shared.neighbours
            rows = piece.rows_of_page(slot // size)
            words = image[piece.rows_of_image()]
            if mixed is not None:
                words = mix_words(words, page[rows], piece.shared, slot % size, slot % size + 1)
                mixed[piece.rows_of_image()] = words
            page[rows] = words


def mix_words(new: jax.Array, old: jax.Array, shared: SharedRows, first, end) -> jax.Array:
    """The words `[rows, 128]` of a set whose tokens [first, end) are new."""
    row, lane = (lax.broadcasted_iota(jnp.int32, new.shape, axis) for axis in (0, 1))
    return jnp.where(shared.is_of(row * LANES + lane, first, end), new, old)


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
                source.at[piece.rows_of_image()],
                page.at[piece.rows_of_page(slot // piece.shared.neighbours)],
                self.semaphore,
            ).start()

    def wait(self, count: jax.Array) -> None:
        """Waits for the copies of `count` tokens."""
        live = self.images.at[pl.ds(0, count)]  # of any rows: a wait counts bytes
        pltpu.make_async_copy(live, live, self.semaphore).wait()
