"""The sizes of a state of matrices, in blocks of 128 channels, and how kernels go over them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.state_place import StatePlace


@dataclass(frozen=True, kw_only=True)
class MatrixSizes:
    """blocks of `together` heads of `head_size` channels (128 in all); `sharing` blocks read one key head."""

    blocks: int
    size: int
    together: int
    head_size: int
    sharing: int

    def slab(self, most: int, packed: bool) -> int:
        """Blocks of a slab: at most `most`, or the fewest that there can be; whole key heads or a divisor of
        one's blocks.
        """
        least = 2 if packed else 1
        fitting = [
            n
            for n in range(least, self.blocks + 1, least)
            if self.blocks % n == 0 and (n % self.sharing == 0 or self.sharing % n == 0)
        ]
        return max((n for n in fitting if n <= most), default=fitting[0])

    def keys(self, slab: int) -> int:
        """Key heads that a slab of so many blocks reads."""
        return max(slab // self.sharing, 1)

    def wide(self, value: jax.Array) -> jax.Array:
        """`[..., H]` as `[..., blocks, 128]`: every head's value on its lanes."""
        lead = value.shape[:-1]
        spread = jnp.broadcast_to(value[..., None], (*value.shape, self.head_size))
        return spread.reshape(*lead, self.blocks, LANES)


def sizes_of(place: StatePlace, key_heads: int) -> MatrixSizes:
    """The sizes of a part `[H, P, size]` with so many key heads."""
    heads, head_size, size = place.shape
    together = LANES // head_size
    return MatrixSizes(
        blocks=heads // together,
        size=size,
        together=together,
        head_size=head_size,
        sharing=heads // key_heads // together,
    )
