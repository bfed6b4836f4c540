"""Tokens that share rows of 128 words in a plane of a page, and which of them a step writes."""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.layout import KEY_SCALES, LANES, AttentionPageLayout
from pallas_kernels.settings import AttentionSettings


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
    def page_sets(self) -> int:
        """Sets of a page."""
        return self.layout.block_size // self.neighbours

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


class NeighbourSets(NamedTuple):
    """The sets that a step writes to, `[N]`; live ones come first.

    page, place      int32: the page, and which of its sets
    first, new       int32: the first of the set's neighbours that is new, how many are; 0 where not live
    token            int32: which of the step's tokens the set's first neighbour is, or would be were it new
    begins_new_page  whether all tokens of the page are new and this is its first set
    """

    page: jax.Array
    place: jax.Array
    first: jax.Array
    new: jax.Array
    token: jax.Array
    begins_new_page: jax.Array


def sets_of(
    batch: RaggedBatch, table: GroupTable, settings: AttentionSettings, shared: SharedRows, count: int
) -> NeighbourSets:
    """The sets that the step's tokens are in, `count` at most."""
    neighbours, block_size = shared.neighbours, settings.layout.block_size
    rows, width = table.block_ids.shape
    lengths = batch.query_starts[1:] - batch.query_starts[:-1]
    begin = batch.seq_lens - lengths
    per_sequence = (batch.seq_lens - 1) // neighbours - begin // neighbours + 1
    per_sequence = jnp.where((jnp.arange(rows) < batch.num_seqs) & (lengths > 0), per_sequence, 0)
    last = jnp.cumsum(per_sequence)
    index = jnp.arange(count, dtype=jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(last, index, side="right"), rows - 1)
    position = ((begin // neighbours - (last - per_sequence))[seq] + index) * neighbours
    start = jnp.maximum(position, begin[seq])
    stop = jnp.minimum(position + neighbours, batch.seq_lens[seq])
    block = position // block_size
    entry = jnp.clip(block - table.first_block[seq], 0, width - 1)
    slot = position % block_size
    return NeighbourSets(
        page=table.block_ids[seq, entry] * settings.layer_slots + settings.layer_slot,
        place=slot // neighbours,
        first=start - position,
        new=jnp.where(index < last[-1], stop - start, 0),
        token=batch.query_starts[seq] + position - begin[seq],
        begins_new_page=(slot == 0) & (start == position) & (batch.seq_lens[seq] - position >= block_size),
    )
