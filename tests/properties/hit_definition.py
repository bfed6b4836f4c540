"""The definition of a hit, by brute force over plain sets. Nothing of the library's own look-up is used here.

A group can serve a prefix of L tokens if it holds, for exactly this prefix,
- full attention and latent caches: every block of [0, L);
- a window of W: the blocks of [L - W + 1, L);
- chunked local attention of C: the blocks of [L // C * C, L);
- a recurrent state: the state after exactly L tokens;
- a group with draft layers (EAGLE): what it needs as above, and the block after (hits inside a block: one
  more hash).
The hit of a prompt of n tokens is the largest L <= n - 1 that every group can serve, of those that prefix
hashes can tell (multiples of the hash block). A block of which only a part is needed serves whole or not at
all, unless hits inside a block are on (then it is copied).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Unit(NamedTuple):
    """hash_block: tokens that one hash covers. inside: whether a hit may end inside a block."""

    hash_block: int
    inside: bool = False


@dataclass(frozen=True)
class GroupRule:
    """One group. block_size: unused for recurrent ones. reach: W of a window or C of local chunks."""

    kind: str
    block_size: int
    reach: int = 0
    is_eagle: bool = False

    def first_needed_token(self, length: int) -> int:
        """The first token that must be readable to go on after `length` tokens. Not for recurrent groups."""
        if self.kind in ("full", "mla"):
            return 0
        if self.kind in ("sliding_window", "sliding_window_mla"):
            return max(0, length - self.reach + 1)
        if self.kind == "chunked_local":
            return length // self.reach * self.reach
        raise ValueError(self.kind)

    def blocks_needed(self, length: int, margin: int = 0) -> list[int]:
        """Indices of the blocks with the tokens that a prefix of `length` tokens needs, and `margin` more.

        Not for recurrent groups.
        """
        first, stop = self.first_needed_token(length), length + margin
        if length == 0 or first >= stop:
            return []
        return list(range(first // self.block_size, (stop - 1) // self.block_size + 1))

    def serves(self, length: int, held: Mapping[int, int], unit: Unit) -> bool:
        """Whether the group can serve the prefix.

        held: by index of this prompt's blocks, how many leading tokens of it some cached block holds; for a
        recurrent group its keys are the lengths whose states are cached.
        """
        if self.kind == "mamba":
            return length == 0 or length in held
        size = self.block_size
        margin = (unit.hash_block if unit.inside else size) if self.is_eagle else 0
        needed = self.blocks_needed(length, margin)
        if length % size and needed and not unit.inside:
            return False
        return all(held.get(i, 0) >= min(size, length + margin - i * size) for i in needed)

    def longest_alone(self, held: Mapping[int, int], num_tokens: int, unit: Unit) -> int:
        """The longest prefix below `num_tokens` that the group alone could serve; 0 if it needs nothing."""
        best = longest_hit([self], [held], num_tokens, unit)
        return best if self.kind == "mamba" or self.blocks_needed(best) else 0


def longest_hit(
    rules: Sequence[GroupRule], held: Sequence[Mapping[int, int]], num_tokens: int, unit: Unit
) -> int:
    """The largest length below `num_tokens` that hashes can tell and every group can serve."""
    best = 0
    for length in range(0, num_tokens, unit.hash_block):
        if all(rule.serves(length, blocks, unit) for rule, blocks in zip(rules, held, strict=True)):
            best = length
    return best
