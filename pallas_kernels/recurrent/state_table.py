"""Which blocks hold the states that a step starts from, ends with and keeps."""

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateTable:
    """The states of a recurrent group's sequences, all int32. A state is spread over P blocks.

    read            `[S, P]`     blocks of the state a sequence starts from; 0: it starts from zeros
    write           `[S, P]`     blocks that get the state after the sequence's last token of the step; 0:
                                 padding, never written
    checkpoint_lens `[S, K]`     also keep the state after so many tokens of the sequence, this step's
                                 included (as in `seq_lens`): more than before the step, at most `seq_lens`;
                                 0: none
    checkpoint      `[S, K, P]`  blocks that get those states; 0: none

    `read` and `write` of a sequence may be the same blocks. Blocks that are written belong to nobody else in
    the step. K may be 0. A sequence without new tokens writes the state it read.
    """

    read: jax.Array
    write: jax.Array
    checkpoint_lens: jax.Array
    checkpoint: jax.Array
