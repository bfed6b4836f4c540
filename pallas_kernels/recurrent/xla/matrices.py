"""Stored states of heads as matrices that one key each goes with."""

from typing import NamedTuple

import jax

from pallas_kernels.recurrent.state_layout import StoredShape


class Matrices(NamedTuple):
    """States `[blocks, size, lanes]` of heads of `head_size` channels, as many a block as fit its lanes."""

    stored: StoredShape
    head_size: int

    @property
    def together(self) -> int:
        """Heads of a block."""
        return self.stored.lanes // self.head_size

    def open(self, stored: jax.Array, key_heads: int) -> jax.Array:
        """`[matrices, size, channels]`: the blocks as they are where a block's heads share a key, else the
        heads, which are then taken apart.
        """
        blocks, size, _ = self.stored
        if blocks % key_heads == 0:
            return stored
        apart = stored.reshape(blocks, size, self.together, self.head_size).transpose(0, 2, 1, 3)
        return apart.reshape(blocks * self.together, size, self.head_size)

    def open_groups(self, stored: jax.Array, groups: int) -> jax.Array:
        """`[groups, size, channels of a group]`: heads that share a key side by side."""
        blocks, size, lanes = self.stored
        return stored.transpose(1, 0, 2).reshape(size, groups, blocks * lanes // groups).transpose(1, 0, 2)

    def close_groups(self, state: jax.Array) -> jax.Array:
        """The inverse of `open_groups`."""
        blocks, size, lanes = self.stored
        return state.transpose(1, 0, 2).reshape(size, blocks, lanes).transpose(1, 0, 2)

    def close(self, matrices: jax.Array) -> jax.Array:
        """The inverse of `open`."""
        blocks, size, lanes = self.stored
        if matrices.shape[0] == blocks:
            return matrices
        apart = matrices.reshape(blocks, self.together, size, self.head_size)
        return apart.transpose(0, 2, 1, 3).reshape(blocks, size, lanes)
