"""The cache manager's tables, group by group, as a step needs them."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.cache_manager import KVCacheManager
from jaxkv.errors import JaxkvError
from jaxkv.managers.positional import PositionalManager


class GroupBlocks(NamedTuple):
    """The blocks of one group by row: entry i of row r, i < held[r], is block `first_block[r] + i` of its
    request.

    block_ids int32[rows, width], first_block and held int64[rows]: views of the manager's tables, good until
    it allocates again.
    """

    block_ids: NDArray[np.int32]
    first_block: NDArray[np.int64]
    held: NDArray[np.int64]


def group_blocks(cache_manager: KVCacheManager) -> list[GroupBlocks]:
    """One for each of the plan's groups, in their order. JaxkvError for groups without block positions."""
    found: dict[int, GroupBlocks] = {}
    for manager in cache_manager.managers:
        if not isinstance(manager, PositionalManager):
            raise JaxkvError(f"layers of kind {manager.spec.kind!r} have no block table yet")
        for sibling, group in enumerate(manager.group_ids):
            found[group] = GroupBlocks(manager.ids[sibling], manager.first_block, manager.count)
    return [found[group] for group in sorted(found)]
