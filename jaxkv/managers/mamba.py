"""Recurrent states: one running state a request, and states kept at positions where a hit may resume."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.arrays import grown
from jaxkv.managers.base import (
    NEVER,
    NO_PART,
    NO_UNITS,
    Filled,
    HitPart,
    Manager,
    ManagerContext,
    Span,
)
from jaxkv.managers.state_finder import StateFinder
from jaxkv.pool import Units
from jaxkv.specs import MambaSpec, cdiv

NO_STATE = 0
_IN_PLACE = -1


class StateUnits(NamedTuple):
    """Which states a step reads and writes: leaders, int32[n] each;
    NO_STATE to read means start from zeros.
    """

    read: NDArray[np.int32]
    write: NDArray[np.int32]


class StepCheckpoints(NamedTuple):
    """States that a step leaves inside its chunks: m of them, in order.

    indices: int[m], the row each belongs to, as an index of the step's rows. entries: int[m], which of the
    row's it is. positions: int[m], the tokens it stands for. leaders: int32[m].
    """

    indices: NDArray[np.intp]
    entries: NDArray[np.intp]
    positions: NDArray[np.int64]
    leaders: NDArray[np.int32]


class MambaManager(Manager):
    """A hit of L needs the state after exactly L tokens.

    A step reads the state it starts from and writes the one it ends with. Within a block that is one unit,
    updated in place; a step that ends in a later block, or that starts from a state in the index, writes to a
    new unit, and the old one is let go of once the step has run. So a row holds at most two states, besides
    those of drafts and those that a prefill leaves at checkpoints inside its chunk.

    current: int32[rows], the unit that the last step writes. limit: int64[rows], tokens up to which it may be
    updated in place. previous, previous_position: the unit that step reads if it is another one, and the
    tokens it stands for. switched_from: int64[rows], computed tokens before the step that first writes
    `current`.
    """

    spec: MambaSpec

    def __init__(
        self,
        context: ManagerContext,
        spec: MambaSpec,
        group_ids: Sequence[int],
        blocks_per_state: int,
        is_eagle: bool,
    ) -> None:
        super().__init__(context, spec, group_ids, blocks_per_state, is_eagle)
        self.keeps_states = spec.mamba_cache_mode == "align"
        self.cacheable = self.cacheable and self.keeps_states
        self.current: NDArray[np.int32] = np.zeros(0, np.int32)
        self.limit: NDArray[np.int64] = np.zeros(0, np.int64)
        self.previous: NDArray[np.int32] = np.zeros(0, np.int32)
        self.previous_position: NDArray[np.int64] = np.zeros(0, np.int64)
        self.switched_from: NDArray[np.int64] = np.zeros(0, np.int64)
        self._speculative: dict[int, NDArray[np.int32]] = {}
        self._checkpoints: dict[int, dict[int, int]] = {}

    # Rows

    def grow_rows(self, num_rows: int) -> None:
        for name in ("current", "limit", "previous", "previous_position", "switched_from"):
            setattr(self, name, grown(getattr(self, name), (num_rows,)))

    def open_row(self, row: int, part: HitPart, span: Span) -> None:
        self.current[row] = self.previous[row] = NO_STATE
        self.limit[row] = 0
        self.previous_position[row] = 0
        self.switched_from[row] = _IN_PLACE
        if len(part.leaders):
            self.pool.touch(self.number, part.leaders)
            self.current[row] = part.leaders[0]
            # A state that others may resume from is never written to.
            self.limit[row] = span.computed

    def close_row(self, row: int) -> Units:
        units = self._positions(row)
        if row in self._speculative:
            units += [(NEVER, leader) for leader in self._speculative.pop(row).tolist()]
        self._checkpoints.pop(row, None)
        self.current[row] = self.previous[row] = NO_STATE
        units.reverse()
        leaders, ranks = [leader for _, leader in units], [-end for end, _ in units]
        if 0 < len(ranks) < 3 and ranks[-1] - ranks[0] == (len(ranks) - 1) * self.block_size:
            # Usual, and then nothing has to be sorted.
            return Units(leaders, range(ranks[0], ranks[-1] + 1, self.block_size))
        return Units(leaders, ranks)

    def units_of(self, row: int) -> NDArray[np.int32]:
        states = np.array([leader for _, leader in self._positions(row)], np.int32)
        return np.concatenate([states, self._speculative.get(row, NO_UNITS)])

    def positional_ids(self, row: int) -> list[list[int]]:
        blocks: dict[int, int] = {}
        for position, leader in self._positions(row):
            blocks[cdiv(position, self.block_size) - 1 if self.keeps_states else 0] = leader
        last = max(blocks, default=-1)
        for offset, leader in enumerate(self._speculative.get(row, NO_UNITS).tolist()):
            blocks[last + 1 + offset] = leader
        table = [[0] * (max(blocks, default=-1) + 1) for _ in self.group_ids]
        for block, leader in blocks.items():
            for sibling, block_id in enumerate(
                self.pool.ids_of(leader, self.number)[:: self.blocks_per_state]
            ):
                table[sibling][block] = block_id
        return table

    def _positions(self, row: int) -> list[tuple[int, int]]:
        """The row's states in order: the last position each may stand for, and its leader.

        The state that a step reads may have the position of one that it leaves inside its chunk.
        """
        units: list[tuple[int, int]] = []
        previous, current = self.previous.item(row), self.current.item(row)
        if previous != NO_STATE:
            units.append((self.previous_position.item(row), previous))
        if row in self._checkpoints:
            units += self._checkpoints[row].items()
        if current != NO_STATE:
            units.append((self.limit.item(row), current))
        return units

    def step_units(self, rows: NDArray[np.intp], computed: NDArray[np.int64]) -> StateUnits:
        """The states that a step of these rows, which starts after `computed` tokens, reads and writes."""
        current = self.current[rows]
        switches = computed == self.switched_from[rows]
        return StateUnits(np.where(switches, self.previous[rows], current), current)

    def step_checkpoints(self, rows: NDArray[np.intp], computed: NDArray[np.int64]) -> StepCheckpoints:
        """The states that a step of these rows, which starts after `computed` tokens, leaves inside."""
        found: list[tuple[int, int, int, int]] = []
        if self._checkpoints:
            for index, (row, start) in enumerate(zip(rows.tolist(), computed.tolist(), strict=True)):
                states = self._checkpoints.get(row, {})
                ahead = sorted(position for position in states if position > start)
                found += [(index, entry, position, states[position]) for entry, position in enumerate(ahead)]
        indices, entries, positions, leaders = np.array(found, np.int64).reshape(-1, 4).T
        return StepCheckpoints(indices, entries, positions, leaders.astype(np.int32))

    # One request

    def release_skipped(self, row: int, computed: int) -> None:
        if self.previous.item(row) != NO_STATE and computed > self.switched_from.item(row):
            self.pool.let_go_one(self.previous.item(row))
            self.previous[row] = NO_STATE
        states = self._checkpoints.get(row)
        if states and computed >= max(states):
            self.let_go(np.array(list(states.values())[::-1], np.int32))
            del self._checkpoints[row]

    def trim(self, part: HitPart, computed: int) -> HitPart:
        # The state of a local hit is of no use where a connector brings a later one.
        return part if part.length == computed else NO_PART

    def units_needed(self, row: int, part: HitPart, span: Span) -> int:
        if row >= 0:
            return int(span.after > self.limit.item(row)) + len(self._inside(span))
        fresh = 1 if span.after > span.computed or not len(part.leaders) else 0
        return fresh + self.spec.num_speculative_blocks + len(self._inside(span))

    def extend(self, row: int, num_units: int, span: Span) -> None:
        leaders = self.pool.take(self.number, num_units)[0].tolist()
        num_scratch = self.spec.num_speculative_blocks
        if num_scratch and row not in self._speculative:
            self._speculative[row] = np.array(leaders[:num_scratch], np.int32)
            del leaders[:num_scratch]
        inside = self._inside(span)
        if inside:
            self._checkpoints[row] = dict(zip(inside, leaders, strict=False))
        if len(leaders) > len(inside):
            brought = self.current.item(row) == NO_STATE and span.computed > 0
            self.previous[row] = self.current[row]
            self.previous_position[row] = self.limit[row]
            self.current[row] = leaders[-1]
            # A connector puts the state into the new unit, which the step then updates in place.
            self.switched_from[row] = _IN_PLACE if brought else span.computed
            self.limit[row] = (
                cdiv(span.after, self.block_size) * self.block_size if self.keeps_states else NEVER
            )

    def _switch(self, rows: NDArray[np.intp], after: NDArray[np.int64], computed: NDArray[np.int64]) -> None:
        """The rows' next step writes to new units: `extend` for many rows."""
        self.previous[rows] = self.current[rows]
        self.previous_position[rows] = self.limit[rows]
        self.current[rows] = self.pool.take(self.number, len(rows))[0]
        self.switched_from[rows] = computed
        self.limit[rows] = -(-after // self.block_size) * self.block_size if self.keeps_states else NEVER

    def _inside(self, span: Span) -> list[int]:
        """Positions inside the step's tokens at which it leaves a state of its own: the last ones wanted."""
        most = self.spec.num_prefill_checkpoint_blocks
        if not most or not self.cacheable:
            return []
        wanted = self.context.retention.wanted_between(span.computed, span.after, span.boundaries)
        return [position for position in wanted if position % self.context.alignment == 0][-most:]

    # Caching

    def finder(self, hashes: list[bytes]) -> StateFinder:
        return StateFinder(self, hashes)

    def cache(self, row: int, filled: Filled) -> None:
        for checkpoint, leader in self._checkpoints.get(row, {}).items():
            known = checkpoint <= min(filled.tokens, len(filled.hashes) * self.context.hash_block_size)
            if known and not self.pool.cached[leader]:
                self._add(leader, checkpoint, filled)
        current, position = self.current.item(row), filled.position
        if filled.tokens != position or current == NO_STATE or self.pool.cached[current]:
            return
        unit = self.context.hash_block_size
        # Drafts and samples that are still on the device have no hash: such a state cannot be found.
        if position % self.context.alignment or position // unit > len(filled.hashes):
            return
        wanted = self.context.retention.wants_exactly(position, filled.info.boundaries)
        if wanted or position % self.block_size == 0:
            self._add(current, position, filled)
            self.limit[row] = position

    def _add(self, leader: int, position: int, filled: Filled) -> None:
        unit = self.context.hash_block_size
        last = position // unit
        key = filled.hashes[last - 1]
        strong = self.context.retention.wants(position, filled.info.boundaries)
        self._add_one_to_index(leader, key, strong, filled.ready_step)
        if self.context.events is not None:
            # A state stands for all tokens before it; it is reported with those since the last hash.
            parent = filled.hashes[last - 2] if last > 1 else None
            self.context.events.stored(
                filled.info.request, self.group_ids, self.spec, [key], parent, position, unit
            )

    def keep_boundary(self, row: int, hashes: list[bytes], boundary: int) -> None:
        leader = self.index.units.get(hashes[boundary // self.context.hash_block_size - 1])
        if leader is not None:
            self.pool.promote(leader)

    def ends_let_go_of(self, row: int, boundaries: Sequence[int]) -> Sequence[int]:
        return boundaries

    def capacity(self, row: int) -> int:
        return self.limit.item(row)

    def next_cached(self, row: int) -> int:
        limit = self.limit.item(row)
        done = self.pool.cached.item(self.current.item(row)) or limit % self.context.alignment
        return NEVER if done else limit

    # All rows of a decode step

    def capacities(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        return self.limit[rows]

    def next_cacheable(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        limits = self.limit[rows]
        done = self.pool.cached[self.current[rows]] | (limits % self.context.alignment != 0)
        return np.where(done, NEVER, limits)

    def release_rows(self, rows: NDArray[np.intp], computed: NDArray[np.int64]) -> None:
        old = rows[(self.previous[rows] != NO_STATE) & (computed > self.switched_from[rows])]
        if len(old):
            self.let_go(self.previous[old])
            self.previous[old] = NO_STATE
        for row in self._checkpoints.keys() & set(rows.tolist()):
            self.release_skipped(row, int(computed[rows == row][0]))

    def rewind(self, rows: NDArray[np.intp], num_tokens: NDArray[np.int64]) -> None:
        for row in self._checkpoints.keys() & set(rows.tolist()):
            states, stands = self._checkpoints[row], int(num_tokens[rows == row][0])
            wrong = [states.pop(position) for position in sorted(states, reverse=True) if position > stands]
            if wrong:
                self.let_go(np.array(wrong, np.int32))
            if not states:
                del self._checkpoints[row]

    def needed_rows(
        self, rows: NDArray[np.intp], after: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        return (after > self.limit[rows]).astype(np.int64)

    def extend_rows(
        self, rows: NDArray[np.intp], num_units: NDArray[np.int64], after: NDArray[np.int64]
    ) -> None:
        switching = num_units > 0
        if switching.any():
            self._switch(rows[switching], after[switching], after[switching] - 1)
