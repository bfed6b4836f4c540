"""A shadow of what the device's pages hold: which prefix of tokens stands behind every slot of every block.

A step writes its tokens where the tables say and reads what its layers need; the shadow checks that each thing
read is exactly what this request's own tokens would have written. A wrong hit, a block freed too early, a write into
a block that another request still reads, a state handed over wrongly: all end in a slot with the wrong prefix.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from tests.properties.hit_definition import GroupRule

#: The prefix id of a slot that nobody has written since its block was last handed out.
POISON = -1


class PrefixIds:
    """Numbers prefixes: two sequences get one number if and only if they are equal, extra keys included."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}
        self._roots: dict[object, int] = {}
        self._count = 0

    def root(self, key: object) -> int:
        """The empty prefix under extra keys (a cache salt, an adapter): different keys share nothing."""
        return self._roots.setdefault(key, self._new() if key not in self._roots else 0)

    def extend(self, prefix: int, tokens: Sequence[int]) -> list[int]:
        """The ids after each of the tokens."""
        ids = []
        for token in tokens:
            key = (prefix, int(token))
            found = self._next.get(key)
            if found is None:
                found = self._next[key] = self._new()
            prefix = found
            ids.append(prefix)
        return ids

    def _new(self) -> int:
        self._count += 1
        return self._count


class Shadow:
    """The contents of every block of a pool, for groups of any kinds.

    A recurrent group's state is one value under its block: the prefix that it has seen, in slot 0.
    """

    def __init__(self, rules: Sequence[GroupRule], num_blocks: int) -> None:
        self.rules = tuple(rules)
        width = max(rule.block_size for rule in rules)
        self.contents = np.full((num_blocks, width), POISON, dtype=np.int64)

    def poison(self, blocks: Sequence[int]) -> None:
        """What blocks held is gone: they were handed out anew."""
        self.contents[np.asarray(blocks, dtype=np.int64)] = POISON

    def check_readable(self, tables: Sequence[Sequence[int]], prefixes: np.ndarray, start: int) -> None:
        """Asserts that a step that begins after `start` tokens finds what every group needs.

        tables: by group, the blocks by position (0: null). prefixes: int64[>= start], the id after each token.
        """
        for group, rule in enumerate(self.rules):
            table = np.asarray(tables[group], dtype=np.int64)
            if start == 0:
                continue
            if rule.kind == "mamba":
                block = table[(start - 1) // rule.block_size]
                assert block != 0, f"group {group}: the state after {start} tokens is not in the table"
                assert self.contents[block, 0] == prefixes[start - 1], (
                    f"group {group}: block {block} does not hold the state after {start} tokens"
                )
                continue
            positions = np.arange(rule.first_needed_token(start), start)
            if not len(positions):
                continue
            blocks = table[positions // rule.block_size]
            assert (blocks != 0).all(), f"group {group}: needed tokens below {start} have no block in {table}"
            held = self.contents[blocks, positions % rule.block_size]
            wrong = positions[held != prefixes[positions]]
            assert not len(wrong), (
                f"group {group} ({rule.kind}): positions {wrong.tolist()} below {start} hold other tokens; "
                f"blocks {table.tolist()}"
            )

    def write(self, tables: Sequence[Sequence[int]], prefixes: np.ndarray, start: int, stop: int) -> None:
        """A step computes tokens [start, stop): attention writes each, a recurrent group its last state."""
        for group, rule in enumerate(self.rules):
            table = np.asarray(tables[group], dtype=np.int64)
            if rule.kind == "mamba":
                block = table[(stop - 1) // rule.block_size]
                assert block != 0, (
                    f"group {group}: no block for the state after {stop} tokens in {table.tolist()}"
                )
                self.contents[block, 0] = prefixes[stop - 1]
                continue
            positions = np.arange(start, stop)
            blocks = table[positions // rule.block_size]
            needed = blocks[positions >= rule.first_needed_token(stop)]
            assert (needed != 0).all(), (
                f"group {group}: tokens {start}..{stop} have no block in {table.tolist()}"
            )
            real = blocks != 0
            self.contents[blocks[real], positions[real] % rule.block_size] = prefixes[positions[real]]

    def cached_indices(self, group: int, prefixes: np.ndarray, cached_blocks: Mapping[int, int]) -> set[int]:
        """Indices of this prompt's blocks whose content some cached block of the group holds in full.

        cached_blocks: block id -> group of every block that the pool offers for hits.
        """
        rule = self.rules[group]
        size = rule.block_size
        mine = [block for block, owner in cached_blocks.items() if owner == group]
        if not mine:
            return set()
        held = self.contents[mine]
        found = set()
        for index in range(len(prefixes) // size):
            wanted = prefixes[index * size : (index + 1) * size]
            same = (
                held[:, 0] == wanted[-1] if rule.kind == "mamba" else (held[:, :size] == wanted).all(axis=1)
            )
            if same.any():
                found.add(index)
        return found
