"""A shadow of what the device's pages hold: which prefix of tokens stands behind every slot of every block.

A step writes its tokens where the tables say and reads what its layers need; the shadow checks that each
thing read is exactly what this request's own tokens would have written. A wrong hit, a block freed too early,
a write into a block that another request still reads, a state handed over wrongly: all end in a slot with the
wrong prefix.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tests.properties.hit_definition import GroupRule

#: The prefix id of a slot that nobody has written since its block was last handed out.
POISON = -1


class PrefixIds:
    """Numbers prefixes: two sequences get one number if and only if they are equal, extra keys included."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, int], int] = {}

    def of(self, key: object, tokens: Iterable[int]) -> np.ndarray:
        """int64[n]: the ids after each of n tokens, under extra keys (a salt, an adapter)."""
        prefix = self._number(("root", key), -1)
        ids = []
        for token in tokens:
            prefix = self._number(prefix, token)
            ids.append(prefix)
        return np.array(ids, dtype=np.int64)

    def _number(self, prefix: object, token: int) -> int:
        return self._numbers.setdefault((prefix, token), len(self._numbers))


class StepRow(NamedTuple):
    """One request's part of a step: it computes tokens [start, stop).

    tables: by group, its blocks by position (0: null). prefixes: int64[>= stop], the id after each token.
    """

    tables: Sequence[Sequence[int]]
    prefixes: np.ndarray
    start: int
    stop: int


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

    def copy(self, source: int, target: int) -> None:
        self.contents[target] = self.contents[source]

    def run_step(self, rows: Sequence[StepRow]) -> None:
        """States are read, everything is written, then attention reads, as in a layer on the device."""
        for row in rows:
            self.check_readable(row.tables, row.prefixes, row.start, kinds="state")
        for row in rows:
            self._write(row)
        for row in rows:
            self.check_readable(row.tables, row.prefixes, row.start, kinds="attention")

    def check_readable(
        self, tables: Sequence[Sequence[int]], prefixes: np.ndarray, start: int, kinds: str = "all"
    ) -> None:
        """Asserts that a step that begins after `start` tokens finds what every group needs."""
        if start == 0:
            return
        for group, rule in enumerate(self.rules):
            if rule.kind == "scratch" or kinds == ("attention" if rule.kind == "mamba" else "state"):
                continue
            table = np.asarray(tables[group], dtype=np.int64)
            if rule.kind == "mamba":
                block = table[(start - 1) // rule.block_size]
                assert block != 0, f"group {group}: the state after {start} tokens is not in {table.tolist()}"
                assert self.contents[block, 0] == prefixes[start - 1], (
                    f"group {group}: block {block} does not hold the state after {start} tokens"
                )
                continue
            positions = np.arange(rule.first_needed_token(start), start)
            if not len(positions):
                continue
            blocks = table[positions // rule.block_size]
            assert (blocks != 0).all(), (
                f"group {group}: tokens below {start} have no block in {table.tolist()}"
            )
            held = self.contents[blocks, positions % rule.block_size]
            wrong = positions[held != prefixes[positions]]
            assert not len(wrong), (
                f"group {group} ({rule.kind}): positions {wrong.tolist()} below {start} hold other tokens; "
                f"table {table.tolist()}"
            )

    def _write(self, row: StepRow) -> None:
        """Attention writes each token, a recurrent group its last state."""
        start, stop = row.start, row.stop
        for group, rule in enumerate(self.rules):
            table = np.asarray(row.tables[group], dtype=np.int64)
            if rule.kind == "scratch":
                continue
            if rule.kind == "mamba":
                block = table[(stop - 1) // rule.block_size]
                assert block != 0, f"group {group}: no block for the state after {stop} in {table.tolist()}"
                self.contents[block, 0] = row.prefixes[stop - 1]
                continue
            positions = np.arange(start, stop)
            blocks = table[positions // rule.block_size]
            assert (blocks != 0).all(), (
                f"group {group}: tokens {start}..{stop} have no block in {table.tolist()}"
            )
            self.contents[blocks, positions % rule.block_size] = row.prefixes[positions]

    def held(self, group: int, prefixes: np.ndarray, blocks: Sequence[int]) -> Mapping[int, int]:
        """By index of a prompt's blocks: how many leading tokens of it the best of `blocks` holds, if any.

        blocks: the blocks of the group that may be used for hits. A state counts as a whole block.
        """
        rule, found = self.rules[group], {}
        if not len(blocks):
            return found
        contents = self.contents[np.asarray(blocks, dtype=np.int64)]
        for index in range(-(-len(prefixes) // rule.block_size)):
            wanted = prefixes[index * rule.block_size : (index + 1) * rule.block_size]
            if rule.kind == "mamba":
                if len(wanted) == rule.block_size and (contents[:, 0] == wanted[-1]).any():
                    found[index] = rule.block_size
                continue
            same = np.cumprod(contents[:, : len(wanted)] == wanted, axis=1).sum(axis=1).max()
            if same:
                found[index] = int(same)
        return found
