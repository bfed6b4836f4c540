"""For tests and debugging: fills every page that holds nothing with NaN, so that whoever reads one is found
out.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxkv.block_tables import BlockTable, StateTable
from jaxkv.cache_manager import KVCacheManager
from jaxkv.engine.runner import ModelRunner
from jaxkv.engine.step_inputs import StepShape
from jaxkv.scheduling.output import SchedulerOutput

NAN_WORD = 0x7FC0_7FC0
"""A NaN as float32, and two NaNs as bfloat16."""

_BLOCKS_A_CALL = 64


class PoisoningRunner(ModelRunner):
    """Before each step, the null block, all free blocks without cached content, those of a request's blocks
    that lie wholly beyond its computed tokens, and states that the step writes but does not read become NaN.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fill = jax.jit(_fill_pages, donate_argnums=0)

    def _tables(
        self, output: SchedulerOutput, cache_manager: KVCacheManager, shape: StepShape
    ) -> list[BlockTable | StateTable]:
        tables = super()._tables(output, cache_manager, shape)
        empty = [np.zeros(1, np.int32), cache_manager.pool.plain_ids()]
        for group, table in zip(self.plan.groups, tables, strict=True):
            if isinstance(table, BlockTable):
                empty.append(_beyond(table, output.num_computed, group.block_size))
            else:
                empty.append(_only_written(table))
        self._poison(np.unique(np.concatenate(empty)))
        return tables

    def _poison(self, block_ids: NDArray[np.int32]) -> None:
        slots = self.plan.layer_slots
        for start in range(0, len(block_ids), _BLOCKS_A_CALL):
            chunk = block_ids[start : start + _BLOCKS_A_CALL]
            page_ids = np.full((_BLOCKS_A_CALL, slots), self.pages.shape[0], np.int32)
            page_ids[: len(chunk)] = chunk[:, None] * slots + np.arange(slots)
            self.pages = self._fill(self.pages, page_ids.reshape(-1))


def _beyond(table: BlockTable, num_computed: NDArray[np.int32], block_size: int) -> NDArray[np.int32]:
    """Ids of a step's blocks that begin at or after the first token of their row that is not computed yet."""
    rows = len(num_computed)
    ids = table.block_ids[:rows]
    position = table.first_block[:rows, None] + np.arange(ids.shape[1])
    return ids[(ids > 0) & (position * block_size >= num_computed[:, None])]


def _only_written(table: StateTable) -> NDArray[np.int32]:
    """Ids of a step's states that are not read."""
    return np.concatenate([table.write[table.write != table.read], table.checkpoint.ravel()])


def _fill_pages(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """Indices past the end are dropped."""
    return pages.at[page_ids].set(jnp.uint32(NAN_WORD), mode="drop")
