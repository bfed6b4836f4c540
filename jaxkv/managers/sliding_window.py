"""Sliding windows, of attention or of a latent cache."""

import numpy as np
from numpy.typing import NDArray

from jaxkv.managers.windowed import WindowedManager
from jaxkv.specs import SlidingWindowSpec


class SlidingWindowManager(WindowedManager):
    """A hit of L needs the blocks of [L - W + 1, L): none at all for a window of 1.

    The tokens that are retained for drafts below the window are needed as well.
    """

    spec: SlidingWindowSpec

    @property
    def max_reach(self) -> int:
        return self.spec.num_retained_tokens

    def first_needed(self, length: int) -> int:
        return max(0, length - self.spec.num_retained_tokens)

    def skipped_tokens(self, computed: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(computed - self.spec.num_retained_tokens, 0)

    def first_skipped(self, computed: int) -> int:
        return self.first_needed(computed) // self.block_size

    def free_boundary(self, limit: int) -> int:
        if self.spec.num_retained_tokens or self.eagle_margin:
            return 0
        return limit // self.context.hash_block_size * self.context.hash_block_size
