"""A step's new tokens as runs, one for each page that they are in, and their words as rows of pages."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.neighbours import shares_of, words_of_shares


class PageRuns(NamedTuple):
    """What is written where, int32; live runs come first.

    live    `[1]`  how many there are
    page    `[N]`  the page
    slot    `[N]`  the slot of the run's first token
    tokens  `[N]`  tokens of the run
    source  `[shares * N]` in each share's rows, the set with the run's first token
    """

    live: jax.Array
    page: jax.Array
    slot: jax.Array
    tokens: jax.Array
    source: jax.Array


class NewPages(NamedTuple):
    """Runs, and for each of `shares_of` the words of their tokens, `uint32[pieces, sets * rows, 128]`.

    The sets of a sequence lie after each other; words of tokens that are not new have no meaning.
    """

    runs: PageRuns
    rows: tuple[jax.Array, ...]


class _Sequences(NamedTuple):
    """int32 `[S]`: the first new position and the end of each sequence; the same where nothing is new."""

    begin: jax.Array
    end: jax.Array


class _Places(NamedTuple):
    """Of each of some places, int32 `[N]`: its sequence, and its number of those that the sequence touches;
    `first [S]` is the first place of each sequence.
    """

    seq: jax.Array
    number: jax.Array
    first: jax.Array
    live: jax.Array


def new_pages(
    k: jax.Array,
    v: jax.Array | None,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
    *,
    first_seq: int | jax.Array = 0,
) -> NewPages:
    """The new tokens of the sequences from `first_seq` on; `k` and `v` as `write_kv_reference` takes them."""
    layout = settings.layout
    block_size = layout.block_size
    tokens, (rows, width) = k.shape[0], table.block_ids.shape
    index = jnp.arange(rows)
    written = (index >= first_seq) & (index < batch.num_seqs)
    lengths = batch.query_starts[1:] - batch.query_starts[:-1]
    sequences = _Sequences(batch.seq_lens - jnp.where(written, lengths, 0), batch.seq_lens)

    runs = _places(sequences, block_size, tokens)
    block = sequences.begin[runs.seq] // block_size + runs.number
    start = jnp.maximum(block * block_size, sequences.begin[runs.seq])
    stop = jnp.minimum((block + 1) * block_size, sequences.end[runs.seq])
    entry = jnp.clip(block - table.first_block[runs.seq], 0, width - 1)
    token_at_0 = batch.query_starts[:-1] - sequences.begin  # the step's token at position 0, were it new
    sources, images = [], []
    for shared, words in zip(shares_of(layout), words_of_shares(layout, k, v), strict=True):
        size = shared.neighbours
        if size == 1:
            sources.append(token_at_0[runs.seq] + start)
            images.append(shared.images(words[:, None]))
            continue
        sets = _places(sequences, size, tokens)
        sources.append((sets.first - sequences.begin // size)[runs.seq] + start // size)
        position = (sequences.begin[sets.seq] // size + sets.number) * size
        token = token_at_0[sets.seq] + position
        of_sets = words[jnp.clip(token[:, None] + jnp.arange(size), 0, tokens - 1)]
        images.append(shared.images(of_sets))
    return NewPages(
        PageRuns(
            live=runs.live.reshape(1),
            page=table.block_ids[runs.seq, entry] * settings.layer_slots + settings.layer_slot,
            slot=start % block_size,
            tokens=stop - start,
            source=jnp.concatenate(sources),
        ),
        tuple(images),
    )


def _places(sequences: _Sequences, size: int, tokens: int) -> _Places:
    """Places of `size` positions that new tokens are in, of a step of `tokens`."""
    begin, end = sequences
    touched = jnp.where(end > begin, (end - 1) // size - begin // size + 1, 0)
    after = jnp.cumsum(touched)
    rows = begin.shape[0]
    index = jnp.arange(min(tokens, tokens // size + 2 * rows), dtype=jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(after, index, side="right"), rows - 1)
    first = after - touched
    return _Places(seq, index - first[seq], first, after[-1])
