"""The definition of a hit, by brute force over plain sets. Nothing of the library's own look-up is used here.

A group can serve a prefix of L tokens if it holds, for exactly this prefix,
- full attention and latent caches: every block of [0, L);
- a window of W: the blocks of [L - W + 1, L);
- chunked local attention of C: the blocks of [L // C * C, L);
- a recurrent state: the state after exactly L tokens.
The hit of a prompt of n tokens is the largest L <= n - 1 that every group can serve, of those that prefix
hashes can tell (multiples of the hash block). A block of which only a part is needed serves whole or not at
all, unless hits inside a block are on (then it is copied).
"""

from collections.abc import Mapping, Sequence
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
        """Indices of the blocks that a prefix of `length` tokens needs."""
        if length == 0:
            return []
        last = (length - 1) // self.block_size
        if self.kind == "mamba":
            return [last]
        first = self.first_needed_token(length)
        return [
            index for index in range(last + 1) if (index + 1) * self.block_size > first and first < length
        ]

    def serves(self, length: int, held: Mapping[int, int], inside: bool = False) -> bool:
        """Whether the group can serve the prefix.

        held: by index of this prompt's blocks, how many leading tokens of it some cached block holds (for a
        recurrent group: the block size, where the state at the block's end is cached).
        inside: whether a hit may end inside a block.
        """
        size, needed = self.block_size, self.blocks_needed(length)
        if length % size and needed and (self.kind == "mamba" or not inside):
            return False
        return all(held.get(i, 0) >= min(size, length - i * size) for i in needed)


def longest_hit(
    rules: Sequence[GroupRule],
    held: Sequence[Mapping[int, int]],
    num_tokens: int,
    hash_block: int,
    inside: bool = False,
) -> int:
    """The largest multiple of `hash_block` below `num_tokens` that every group can serve."""
    best = 0
    for length in range(0, num_tokens, hash_block):
        if all(rule.serves(length, blocks, inside) for rule, blocks in zip(rules, held, strict=True)):
            best = length
    return best
