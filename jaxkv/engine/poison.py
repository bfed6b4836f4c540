"""For tests and debugging: fills every page that holds nothing with NaN, so that whoever reads one is found
out.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxkv.cache_manager import KVCacheManager
from jaxkv.engine.group_blocks import GroupBlocks
from jaxkv.engine.runner import ModelRunner, StartedStep
from jaxkv.engine.sampling_table import SamplingTable
from jaxkv.request_table import RequestTable
from jaxkv.scheduling.output import SchedulerOutput

NAN_WORD = 0x7FC0_7FC0
"""A NaN as float32, and two NaNs as bfloat16."""

_BLOCKS_A_CALL = 64


class PoisoningRunner(ModelRunner):
    """Before each step, the null block, all free blocks without cached content, and those of a request's
    blocks that lie wholly beyond its computed tokens become NaN.

    cache_manager: whose blocks these are; set it before the first step.
    """

    cache_manager: KVCacheManager

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fill = jax.jit(_fill_pages, donate_argnums=0)

    def start(
        self,
        output: SchedulerOutput,
        table: RequestTable,
        blocks: Sequence[GroupBlocks],
        sampling: SamplingTable,
    ) -> StartedStep:
        empty = [np.zeros(1, np.int32), self.cache_manager.pool.plain_ids()]
        for group, tables in zip(self.plan.groups, blocks, strict=True):
            empty.append(_beyond(tables, output, group.block_size))
        self._poison(np.unique(np.concatenate(empty)))
        return super().start(output, table, blocks, sampling)

    def _poison(self, block_ids: NDArray[np.int32]) -> None:
        slots = self.plan.layer_slots
        for start in range(0, len(block_ids), _BLOCKS_A_CALL):
            chunk = block_ids[start : start + _BLOCKS_A_CALL]
            page_ids = np.full((_BLOCKS_A_CALL, slots), self.pages.shape[0], np.int32)
            page_ids[: len(chunk)] = chunk[:, None] * slots + np.arange(slots)
            self.pages = self._fill(self.pages, page_ids.reshape(-1))


def _beyond(tables: GroupBlocks, output: SchedulerOutput, block_size: int) -> NDArray[np.int32]:
    """Ids of the step's blocks that begin at or after the first token that is not computed yet."""
    ids = tables.block_ids[output.rows]
    position = tables.first_block[output.rows][:, None] + np.arange(ids.shape[1])
    held = np.arange(ids.shape[1]) < tables.held[output.rows][:, None]
    return ids[held & (position * block_size >= output.num_computed[:, None])]


def _fill_pages(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """Indices past the end are dropped."""
    return pages.at[page_ids].set(jnp.uint32(NAN_WORD), mode="drop")
