"""Hits that end inside a block (copy-on-write): the unit to copy the covered part from.

A unit serves the first tokens of a block if it holds the whole block of this very prompt, or if a prefix that
ends inside it was recorded for it: the tail of another prompt, or a block of a prompt that goes on
differently.
The copy is made before the step runs, so a unit whose content this very step computes is of no use yet.
"""

from typing import NamedTuple

from jaxkv.managers.positional import PositionalManager
from jaxkv.managers.prefix_index import NOT_READY


class Inside(NamedTuple):
    """length: tokens up to which the block can be served, its begin if not at all. leader: where they are, or
    -1.

    waits: a longer answer was passed over because its content is still being computed.
    """

    length: int
    leader: int
    waits: bool


def find_inside(manager: PositionalManager, hashes: list[bytes], block: int, limit: int) -> Inside:
    """The most leading tokens of a block that can be served without all of it,
    up to `limit` tokens of prompt.
    """
    unit, size = manager.context.hash_block_size, manager.block_size
    index, ready = manager.index, manager.pool.ready_step
    step = manager.context.clock.step
    limit = min(limit // unit, len(hashes), (block + 1) * manager.hashes_per_block - 1)
    begin = block * manager.hashes_per_block
    awaited = begin
    end = begin + manager.hashes_per_block
    whole = index.units.get(hashes[end - 1]) if end <= len(hashes) else None
    if whole is not None and limit > begin:
        if ready[whole] <= step:
            return Inside(limit * unit, whole, False)
        awaited = limit
    # Of the recorded prefixes any that is at least as long will do, but what is needed is the longest.
    for position in range(min(end - 1, len(hashes)), begin, -1):
        leader = index.find_partial(hashes[position - 1], step)
        if leader is None:
            continue
        length = min(position, limit)
        if leader == NOT_READY:
            awaited = max(awaited, length)
        elif length > begin:
            return Inside(length * unit, leader, awaited > length)
    return Inside(block * size, -1, awaited > begin)
