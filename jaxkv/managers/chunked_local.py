"""Chunked local attention: a token reads its own chunk only."""

import numpy as np
from numpy.typing import NDArray

from jaxkv.managers.windowed import WindowedManager
from jaxkv.specs import ChunkedLocalAttentionSpec


class ChunkedLocalManager(WindowedManager):
    """A hit of L needs the blocks of [L // C * C, L): none where L is the end of a chunk.

    C need not be a multiple of the block: a block may then belong to two chunks.
    """

    spec: ChunkedLocalAttentionSpec

    @property
    def max_reach(self) -> int:
        return self.spec.attention_chunk_size - 1

    def first_needed(self, length: int) -> int:
        return length // self.spec.attention_chunk_size * self.spec.attention_chunk_size

    def skipped_tokens(self, computed: NDArray[np.int64]) -> NDArray[np.int64]:
        return computed // self.spec.attention_chunk_size * self.spec.attention_chunk_size

    def first_skipped(self, computed: int) -> int:
        return self.first_needed(computed) // self.block_size

    def free_boundary(self, limit: int) -> int:
        boundary = self.first_needed(limit)
        if self.eagle_margin or boundary % self.context.hash_block_size:
            return 0
        return boundary
