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
    states: by recurrent group, the blocks it reads and writes. brought: the tokens come from elsewhere, and
    only those that are still of use to later ones have blocks.
    """

    tables: Sequence[Sequence[int]]
    prefixes: np.ndarray
    start: int
    stop: int
    states: Mapping[int, "StateBlocks"]
    brought: bool = False

    def written(self, block_sizes: Sequence[int]) -> set[int]:
        """The blocks that it writes. block_sizes: by group, in tokens."""
        blocks = {state.write for state in self.states.values()}
        for group, (table, size) in enumerate(zip(self.tables, block_sizes, strict=True)):
            if group not in self.states:
                blocks.update(table[self.start // size : -(-self.stop // size)])
        return blocks


class StateBlocks(NamedTuple):
    """Where a step reads the state it starts from (0: none), and where it writes the one it ends with."""

    read: int
    write: int


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

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Whole blocks; every source is read before any target is written."""
        self.contents[targets] = self.contents[sources]

    def run_step(self, rows: Sequence[StepRow]) -> None:
        """States are read, everything is written, then attention reads, as in a layer on the device."""
        for row in rows:
            for group, state in row.states.items():
                self.check_state(group, state.read, row.prefixes, row.start)
        for row in rows:
            self._write(row)
        for row in rows:
            if not row.brought:
                self.check_attention(row.tables, row.prefixes, row.start)

    def check_state(self, group: int, block: int, prefixes: np.ndarray, start: int) -> None:
        """Asserts that `block` holds the state after `start` tokens; at the start none is read."""
        if start == 0:
            assert block == 0, f"group {group}: a new sequence starts from the state in block {block}"
            return
        assert block != 0, f"group {group}: no state to go on from after {start} tokens"
        assert self.contents[block, 0] == prefixes[start - 1], (
            f"group {group}: block {block} does not hold the state after {start} tokens"
        )

    def check_attention(self, tables: Sequence[Sequence[int]], prefixes: np.ndarray, start: int) -> None:
        """Asserts that a step that begins after `start` tokens finds what every attention group needs."""
        for group, rule in enumerate(self.rules):
            if rule.kind in ("scratch", "mamba") or start == 0:
                continue
            table = np.asarray(tables[group], dtype=np.int64)
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
        for group, state in row.states.items():
            assert state.write != 0, f"group {group}: no block for the state after {stop} tokens"
            self.contents[state.write, 0] = row.prefixes[stop - 1]
        for group, rule in enumerate(self.rules):
            if rule.kind in ("scratch", "mamba"):
                continue
            table = np.asarray(row.tables[group], dtype=np.int64)
            positions = np.arange(start, stop)
            if row.brought:
                # Whole blocks, from the first that is of use to a later token.
                positions = positions[table[positions // rule.block_size] != 0]
                assert set(range(rule.first_needed_token(stop), stop)) <= {*range(start), *positions.tolist()}
            blocks = table[positions // rule.block_size]
            assert (blocks != 0).all(), (
                f"group {group}: tokens {start}..{stop} have no block in {table.tolist()}"
            )
            self.contents[blocks, positions % rule.block_size] = row.prefixes[positions]

    def held(self, group: int, prefixes: np.ndarray, blocks: Sequence[int]) -> Mapping[int, int]:
        """What `GroupRule.serves` wants to know, if `blocks` of the group may be used for hits."""
        rule, found = self.rules[group], {}
        if not len(blocks):
            return found
        contents = self.contents[np.asarray(blocks, dtype=np.int64)]
        if rule.kind == "mamba":
            return dict.fromkeys((np.flatnonzero(np.isin(prefixes, contents[:, 0])) + 1).tolist(), 1)
        for index in range(-(-len(prefixes) // rule.block_size)):
            wanted = prefixes[index * rule.block_size : (index + 1) * rule.block_size]
            same = np.cumprod(contents[:, : len(wanted)] == wanted, axis=1).sum(axis=1).max()
            if same:
                found[index] = int(same)
        return found
