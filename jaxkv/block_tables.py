"""Tables of fixed shape for the device:
what a step needs to know of every group's blocks, padded to a bucket.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.errors import JaxkvError
from jaxkv.managers import MambaManager, PositionalManager
from jaxkv.managers.private import PrivateManager

if TYPE_CHECKING:
    from jaxkv.cache_manager import KVCacheManager


class BlockTable(NamedTuple):
    """One group's blocks. Entry i of sequence s is block first_block[s] + i of that sequence.

    block_ids: int32[num_seqs, width], 0 (the null block) beyond a sequence's blocks and in padding sequences.
    first_block: int32[num_seqs].
    """

    block_ids: NDArray[np.int32]
    first_block: NDArray[np.int32]


class StateTable(NamedTuple):
    """One recurrent group's states: the blocks that hold the state a step starts from, and those it writes.

    read, write: int32[num_seqs, blocks_per_state]; 0 to read means a state of zeros, 0 to write padding. They
    are equal where the state is updated in place.
    checkpoint_lens: int32[num_seqs, width], tokens of the sequence after which the step also leaves a state;
    0: none. checkpoint: int32[num_seqs, width, blocks_per_state], where.
    """

    read: NDArray[np.int32]
    write: NDArray[np.int32]
    checkpoint_lens: NDArray[np.int32]
    checkpoint: NDArray[np.int32]


def padded_tables(
    cache: "KVCacheManager",
    rows: NDArray[np.integer],
    num_computed: NDArray[np.integer],
    *,
    num_seqs: int,
    widths: Sequence[int],
) -> list[BlockTable | StateTable]:
    """By group of the plan: the tables of a step over these rows, which have int[n] `num_computed` tokens
    before it.

    num_seqs: sequences of the bucket, at least n. widths: entries of each group's table; of states, those
    left inside a chunk. Raises JaxkvError where a row holds more than its table has entries.
    """
    if len(rows) > num_seqs:
        raise JaxkvError(f"{len(rows)} rows do not fit into {num_seqs} sequences")
    if len(widths) != len(cache.plan.groups):
        raise JaxkvError(f"{len(cache.plan.groups)} groups need as many table widths, not {len(widths)}")
    index = np.asarray(rows, np.intp)
    tables: dict[int, BlockTable | StateTable] = {}
    for manager in cache.managers:
        if isinstance(manager, MambaManager):
            tables.update(_state_tables(manager, index, np.asarray(num_computed, np.int64), num_seqs, widths))
            continue
        if not isinstance(manager, PositionalManager | PrivateManager):
            raise JaxkvError(f"groups of kind {manager.spec.kind!r} have no tables")
        count = manager.count[index]
        first = np.zeros(num_seqs, np.int32)
        if isinstance(manager, PositionalManager):
            first[: len(rows)] = manager.first_block[index]
        for sibling, group in enumerate(manager.group_ids):
            width = widths[group]
            if len(rows) and int(count.max()) > width:
                raise JaxkvError(
                    f"group {group} holds {int(count.max())} blocks, its table has {width} entries"
                )
            ids = np.zeros((num_seqs, width), np.int32)
            have = min(width, manager.ids.shape[2])
            held = np.arange(have) < count[:, None]
            np.copyto(
                ids[: len(rows), :have],
                manager.ids[sibling * manager.blocks_per_state, index, :have],
                where=held,
            )
            tables[group] = BlockTable(ids, first)
    return [tables[group] for group in range(len(cache.plan.groups))]


def _state_tables(
    manager: MambaManager,
    rows: NDArray[np.intp],
    num_computed: NDArray[np.int64],
    num_seqs: int,
    widths: Sequence[int],
) -> dict[int, BlockTable | StateTable]:
    units = manager.step_units(rows, num_computed)
    read = manager.pool.members(manager.number, units.read)
    write = manager.pool.members(manager.number, units.write)
    inside = manager.step_checkpoints(rows, num_computed)
    kept = manager.pool.members(manager.number, inside.leaders)
    size = manager.blocks_per_state
    tables: dict[int, BlockTable | StateTable] = {}
    for sibling, group in enumerate(manager.group_ids):
        width = widths[group]
        if len(inside.entries) and inside.entries.max() >= width:
            raise JaxkvError(
                f"a step leaves {inside.entries.max() + 1} states of group {group} inside a chunk, its table "
                f"has {width} entries"
            )
        table = StateTable(
            np.zeros((num_seqs, size), np.int32),
            np.zeros((num_seqs, size), np.int32),
            np.zeros((num_seqs, width), np.int32),
            np.zeros((num_seqs, width, size), np.int32),
        )
        part = slice(sibling * size, (sibling + 1) * size)
        table.read[: len(rows)] = np.where(units.read[:, None] > 0, read[part].T, 0)
        table.write[: len(rows)] = write[part].T
        table.checkpoint_lens[inside.indices, inside.entries] = inside.positions
        table.checkpoint[inside.indices, inside.entries] = kept[part].T
        tables[group] = table
    return tables
