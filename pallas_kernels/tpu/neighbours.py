"""Tokens that share rows of 128 words in a plane of a page, and which of them a step writes."""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.layout import LANES, AttentionPageLayout
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

    def first_row(self, head: int) -> int:
        """The row of a page with which a head's plane begins."""
        return self.layout.first_word(head, self.plane) // LANES


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
