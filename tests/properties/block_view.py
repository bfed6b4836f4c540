"""Looks into a cache manager: which blocks a request holds, reads and writes, and which may be hit."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxkv.cache_manager import KVCacheManager
from jaxkv.errors import JaxkvError
from jaxkv.managers.mamba import MambaManager
from tests.properties.shadow import StateBlocks

Tables = list[list[int]]


class BlockView:
    """Reads only. `recurrent`: groups that keep states."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self.recurrent = {
            group for part in manager.managers if isinstance(part, MambaManager) for group in part.group_ids
        }

    def holds(self, request_id: str) -> bool:
        """Whether the request has blocks."""
        try:
            self._manager.row_of(request_id)
        except JaxkvError:
            return False
        return True

    def state_blocks(self, request_id: str, start: int) -> dict[int, StateBlocks]:
        """By recurrent group: where a step that starts after `start` tokens reads and writes its state."""
        blocks: dict[int, StateBlocks] = {}
        rows = np.array([self._manager.row_of(request_id)])
        for part in self._manager.managers:
            if isinstance(part, MambaManager):
                units = part.step_units(rows, np.array([start]))
                read, write = (self._manager.pool.members(part.number, leaders)[:, 0] for leaders in units)
                for sibling, group in enumerate(part.group_ids):
                    source = int(read[sibling]) if units.read[0] else 0
                    blocks[group] = StateBlocks(source, int(write[sibling]))
        return blocks

    def fresh_blocks(
        self,
        tables: Tables,
        states: Mapping[int, StateBlocks],
        old_tables: Tables,
        old_states: Mapping[int, StateBlocks],
        start: int,
    ) -> list[int]:
        """Blocks that were handed out for a step from token `start` on, given what the request had before."""
        fresh: list[int] = []
        for group, table in enumerate(tables):
            if group in states:
                if states[group].write not in old_states.get(group, ()):
                    fresh.append(states[group].write)
                continue
            had = set(old_tables[group]) if old_tables else set()
            size = self._block_sizes[group]
            fresh += [block for block in table[start // size :] if block and block not in had]
        return fresh

    def held_blocks(self, request_id: str) -> dict[int, list[int]]:
        """By group: all blocks of a request. Asserts that its tables show them; states may be hidden."""
        row = self._manager.row_of(request_id)
        held: dict[int, list[int]] = {}
        for part in self._manager.managers:
            ids = self._manager.pool.members(part.number, part.units_of(row))
            held.update(zip(part.group_ids, ids.tolist(), strict=True))
        for group, table in enumerate(self._manager.get_block_ids(request_id)):
            shown = {block for block in table if block}
            assert shown == set(held[group]) or (group in self.recurrent and shown < set(held[group]))
        return held

    def cached_blocks(self) -> dict[int, list[int]]:
        """By group: blocks that the pool offers for hits."""
        pool = self._manager.pool
        offered: dict[int, list[int]] = {}
        for part in self._manager.managers:
            ids = pool.members(part.number, pool.cached_units(part.number))[:: part.blocks_per_state]
            offered.update(zip(part.group_ids, ids.tolist(), strict=True))
        return offered

    def check_counts(self, request_ids: Sequence[str]) -> None:
        """Counts blocks from the tables of all requests that hold any, and compares with the pool's count."""
        owners: dict[int, int] = {}
        for request_id in request_ids:
            for group, blocks in self.held_blocks(request_id).items():
                assert len(set(blocks)) == len(blocks), "a block twice in one table"
                for block in blocks:
                    assert 0 < block < self._manager.pool.num_blocks
                    assert owners.setdefault(block, group) == group, f"block {block} is in two groups' tables"
        held = set(owners)
        for number, leader in self._manager.copies.held():
            # What a step copies from is kept until the step has run.
            held.update(self._manager.pool.ids_of(leader, number))
        for number, leader in self._manager.computed.held():
            # What has not been offered to a connector yet.
            held.update(self._manager.pool.ids_of(leader, number))
        assert self._manager.num_free_blocks == self._manager.pool.num_blocks - 1 - len(held)

    @property
    def _block_sizes(self) -> list[int]:
        return [group.spec.block_size for group in self._manager.plan.groups]
