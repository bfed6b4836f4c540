"""Tokens that share rows of 128 words in a plane of a page."""

from dataclasses import dataclass
from math import gcd

import jax
import jax.numpy as jnp

from pallas_kernels.layout import KEY_SCALES, LANES, AttentionPageLayout


@dataclass(frozen=True)
class SharedRows:
    """A plane of the pages of `layout`: `neighbours` tokens in a row fill `rows` rows, a set."""

    layout: AttentionPageLayout
    plane: int

    @property
    def token_words(self) -> int:
        """Words of a token."""
        return self.layout.token_words[self.plane]

    @property
    def neighbours(self) -> int:
        """The fewest tokens that fill whole rows together."""
        return LANES // gcd(LANES, self.token_words)

    @property
    def rows(self) -> int:
        """Rows of a set."""
        return self.neighbours * self.token_words // LANES

    @property
    def pieces(self) -> int:
        """Parts of a page, one for each head, that have their rows of a set."""
        return self.layout.num_kv_heads

    def first_row(self, piece: int) -> int:
        """The row of a page with which a head's plane begins."""
        return self.layout.first_word(piece, self.plane) // LANES

    def images(self, words: jax.Array) -> jax.Array:
        """The rows of sets, `[pieces, N * rows, 128]`, from `words [N, neighbours, Hkv, token_words]`."""
        return words.transpose(2, 0, 1, 3).reshape(self.pieces, -1, LANES)

    def is_of(self, word: jax.Array, first: jax.Array, after: jax.Array) -> jax.Array:
        """Whether a word of a piece's sets is of tokens [first, after), both counted from the first set."""
        return (word >= first * self.token_words) & (word < after * self.token_words)


class SharedScaleRows(SharedRows):
    """The scales of K and V, one word each, in planes from `KEY_SCALES` on.

    Vectors of `block_size` scales lie one after another. Of up to 128 tokens a set are all scales of a page,
    which share rows; of more, a row of every vector.
    """

    def __init__(self, layout: AttentionPageLayout) -> None:
        super().__init__(layout, KEY_SCALES)

    @property
    def neighbours(self) -> int:
        return min(self.layout.block_size, LANES)

    @property
    def rows(self) -> int:
        return -(-self._vectors * self.neighbours // LANES) // self.pieces

    @property
    def pieces(self) -> int:
        return 1 if self.layout.block_size <= LANES else self._vectors

    def first_row(self, piece: int) -> int:
        return (self.layout.first_word(0, self.plane) + piece * self.layout.block_size) // LANES

    def images(self, words: jax.Array) -> jax.Array:
        """As of `SharedRows`, from `words [N, neighbours, vectors, 1]`; words past the last are 0."""
        vectors = words[..., 0].transpose(2, 0, 1) if self.pieces > 1 else words[..., 0].transpose(0, 2, 1)
        by_piece = vectors.reshape(self.pieces, words.shape[0], -1)
        padding = self.rows * LANES - by_piece.shape[2]
        return jnp.pad(by_piece, ((0, 0), (0, 0), (0, padding))).reshape(self.pieces, -1, LANES)

    def is_of(self, word: jax.Array, first: jax.Array, after: jax.Array) -> jax.Array:
        token = word // (self.rows * LANES) * self.neighbours + word % self.neighbours
        return (token >= first) & (token < after)

    @property
    def _vectors(self) -> int:
        return 2 * self.layout.num_kv_heads


def shares_of(layout: AttentionPageLayout) -> tuple[SharedRows, ...]:
    """All planes of a page; the scales of 8-bit numbers are one."""
    if layout.is_quantised:
        return SharedRows(layout, 0), SharedScaleRows(layout)
    return tuple(SharedRows(layout, plane) for plane in range(layout.planes))


def words_of_shares(layout: AttentionPageLayout, k: jax.Array, v: jax.Array | None) -> tuple[jax.Array, ...]:
    """The words of new tokens `[T, heads or vectors, W]` for each of `shares_of`; see `pack_tokens`."""
    planes = layout.pack_tokens(k, v)
    if layout.is_quantised:
        return *planes[:KEY_SCALES], jnp.concatenate(planes[KEY_SCALES:], axis=1)
    return planes
