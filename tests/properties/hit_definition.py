"""The definition of a hit, by brute force over plain sets. Nothing of the library's own look-up is used here.

A group can serve a prefix of L tokens if it holds, for exactly this prefix,
- full attention and latent caches: every block of [0, L);
- a window of W: the blocks of [L - W + 1, L);
- chunked local attention of C: the blocks of [L // C * C, L);
- a recurrent state: the state after exactly L tokens.
The hit of a prompt of n tokens is the largest aligned L <= n - 1 that every group can serve.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupRule:
    """One group. reach: W of a window, C of chunked local attention, else unused."""

    kind: str
    block_size: int
    reach: int = 0

    def first_needed_token(self, length: int) -> int:
        """The first token that must be readable to go on after `length` tokens. Not for recurrent groups."""
        if self.kind in ("full", "mla"):
            return 0
        if self.kind in ("sliding_window", "sliding_window_mla"):
            return max(0, length - self.reach + 1)
        if self.kind == "chunked_local":
            return length // self.reach * self.reach
        raise ValueError(self.kind)

    def blocks_needed(self, length: int) -> list[int]:
        """Indices of the blocks that a prefix of `length` tokens needs; `length` is a multiple of the block."""
        if length == 0:
            return []
        if self.kind == "mamba":
            return [length // self.block_size - 1]
        first = self.first_needed_token(length)
        return [index for index in range(length // self.block_size) if (index + 1) * self.block_size > first]

    def serves(self, length: int, cached: set[int]) -> bool:
        """Whether the group can serve the prefix; `cached`: indices of its blocks cached for this prompt."""
        return all(index in cached for index in self.blocks_needed(length))


def longest_hit(
    rules: Sequence[GroupRule], cached: Sequence[set[int]], num_tokens: int, alignment: int
) -> int:
    """The largest multiple of `alignment` below `num_tokens` that every group can serve."""
    best = 0
    for length in range(0, num_tokens, alignment):
        if all(rule.serves(length, blocks) for rule, blocks in zip(rules, cached, strict=True)):
            best = length
    return best
