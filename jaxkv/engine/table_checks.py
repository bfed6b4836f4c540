"""Checks of a step's tables on the host: JAX clips a bad index silently, and a state that is written where it
must not be spoils the answers of others.
"""

import numpy as np
from numpy.typing import NDArray

from jaxkv.block_tables import BlockTable, StateTable
from jaxkv.cache_manager import KVCacheManager
from jaxkv.errors import JaxkvError
from jaxkv.managers import MambaManager
from jaxkv.planning.plan import CachePlan
from jaxkv.scheduling.output import SchedulerOutput


def check_blocks(plan: CachePlan, group: int, table: BlockTable, output: SchedulerOutput) -> None:
    """JaxkvError unless every id of a group's table is in the pool, and each row's blocks reach the tokens
    that it computes.
    """
    needed = output.num_computed + output.num_scheduled
    block_ids, first_block = table.block_ids[: len(needed)], table.first_block[: len(needed)]
    _check_ids(plan, group, block_ids, output)
    end = (first_block + np.count_nonzero(block_ids, axis=1)) * plan.groups[group].block_size
    if (end < needed).any():
        row = int(np.argmax(end < needed))
        raise JaxkvError(
            f"request {output.request_ids[row]!r} computes up to token {needed[row]} but its blocks of "
            f"group {group} end at token {end[row]}"
        )


def check_states(plan: CachePlan, group: int, table: StateTable, output: SchedulerOutput) -> None:
    """JaxkvError unless every id of a group's table is in the pool, each row has a state to write, and one to
    read unless it starts its sequence.
    """
    rows = len(output)
    for ids in (table.read[:rows], table.write[:rows], table.checkpoint[:rows].reshape(rows, -1)):
        _check_ids(plan, group, ids, output)
    missing = (table.write[:rows] == 0).any(axis=1)
    if missing.any():
        row = int(np.argmax(missing))
        raise JaxkvError(f"request {output.request_ids[row]!r} has no state of group {group} to write to")
    wrong = (table.read[:rows] == 0).any(axis=1) != (output.num_computed == 0)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise JaxkvError(
            f"request {output.request_ids[row]!r} has {output.num_computed[row]} computed tokens and reads "
            f"the state in blocks {table.read[row].tolist()} of group {group}; a state of zeros (block 0) is "
            "right for 0 tokens and for no others"
        )


def check_written_states(cache_manager: KVCacheManager, output: SchedulerOutput) -> None:
    """JaxkvError unless whatever state a step writes is held by its row alone and, if it can be found by
    others, is one that this very step completes.
    """
    pool, step = cache_manager.pool, cache_manager.clock.step
    rows, computed = output.rows.astype(np.intp), output.num_computed.astype(np.int64)
    for manager in cache_manager.managers:
        if not isinstance(manager, MambaManager):
            continue
        inside = manager.step_checkpoints(rows, computed)
        written = np.concatenate([manager.step_units(rows, computed).write, inside.leaders])
        known = pool.cached[written] & (pool.ready_step[written] <= step)
        wrong = known | (pool.holders[written] != 1)
        if wrong.any():
            index = int(np.argmax(wrong))
            row = np.concatenate([np.arange(len(rows)), inside.indices])[index]
            raise JaxkvError(
                f"request {output.request_ids[row]!r} must not write the state in block {written[index]} of "
                f"group {manager.group_ids[0]}: it has {pool.holders[written[index]]} holders and is "
                f"{'' if known[index] else 'not '}cached; a state is written by its only holder before it is "
                "cached"
            )


def _check_ids(plan: CachePlan, group: int, ids: NDArray[np.int32], output: SchedulerOutput) -> None:
    """ids int32[n, entries]: must be in the pool."""
    if ids.size and (ids.min() < 0 or ids.max() >= plan.num_blocks):
        row, entry = np.argwhere((ids < 0) | (ids >= plan.num_blocks))[0]
        raise JaxkvError(
            f"request {output.request_ids[row]!r} has block id {ids[row, entry]} at entry {entry} "
            f"of its table for group {group}; ids are from 1 to {plan.num_blocks - 1}"
        )
