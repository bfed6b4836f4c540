"""The block pool: ids, reference counts, what is free and in which order it is given out."""

from jaxkv.pool.block_pool import MAX_BLOCKS, NOT_CACHED, NULL_BLOCK, BlockPool, EvictionListener
from jaxkv.pool.units import Units, by_end

__all__ = [
    "MAX_BLOCKS",
    "NOT_CACHED",
    "NULL_BLOCK",
    "BlockPool",
    "EvictionListener",
    "Units",
    "by_end",
]
