"""The arrays that describe one step: which tokens, of which sequences, in which blocks."""

from dataclasses import dataclass, field

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """The tokens of a step, all int32, shared by every group of layers.

    T and S are bucket sizes; real tokens and sequences come first, padding after them. Sequences are ordered:
    the first `num_decodes` have exactly one query token (so token i belongs to sequence i), then prefill
    chunks.
    The queries of a sequence are its last `query_starts[s+1] - query_starts[s]` positions.
    A sequence may read what another one writes in the same step, but for the first `num_decodes`: they read
    what earlier steps wrote, and what they write themselves. Others of one token come after them.

    positions     `[T]`   position of a token in its sequence
    seq_ids       `[T]`   row of the token's sequence, in [0, S); S for padding tokens, which are dropped
    query_starts  `[S+1]` first token of each sequence; padding rows repeat the end
    seq_lens      `[S]`   tokens of the sequence, this step's included; 0 for padding rows
    num_decodes   `[]`    sequences with one query token, at the front
    num_seqs      `[]`    sequences in all
    decode_only   whether there are no prefill chunks (num_decodes equals num_seqs), known when compiling:
                  what would serve them is left out
    """

    positions: jax.Array
    seq_ids: jax.Array
    query_starts: jax.Array
    seq_lens: jax.Array
    num_decodes: jax.Array
    num_seqs: jax.Array
    decode_only: bool = field(default=False, metadata={"static": True})


def num_tokens(batch: RaggedBatch) -> int:
    """T, padding included. Raises ValueError for a batch that has no token or no row."""
    tokens, rows = batch.positions.shape[0], batch.seq_lens.shape[0]
    if not tokens or not rows:
        raise ValueError(
            f"a step has at least one token and one row, padding included; this one has {tokens} and {rows}"
        )
    return tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupTable:
    """The blocks that a group's layers share, int32.

    block_ids    `[S, W]` entry i of row s is the id of block `first_block[s] + i` of the sequence
    first_block  `[S]`    index of the first block the row holds; blocks before it are forgotten

    Entries past a row's live blocks may hold anything in range (0, the null block, by custom). Ids are
    trusted: the host checks them before a step.
    """

    block_ids: jax.Array
    first_block: jax.Array
