"""Blocks copied on the device, where a hit ends inside one."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.copies import BlockCopies
from jaxkv.engine.block_copies import BlockCopier
from jaxkv.errors import JaxkvError

SLOTS = 3


def pool(num_blocks: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**32, (num_blocks * SLOTS, 8, 128), dtype=np.uint32)


@pytest.mark.parametrize("count", [0, 1, 16, 21])
def test_targets_become_their_sources_and_nothing_else_changes(count):
    before = pool(60)
    ids = 1 + np.random.default_rng(1).permutation(59).astype(np.int32)
    copies = BlockCopies(ids[:count], ids[count : 2 * count])
    copier = BlockCopier(SLOTS)
    copier.compile(jnp.asarray(before))
    after = np.asarray(copier.run(jnp.asarray(before), copies)).reshape(60, SLOTS, 8, 128)
    expected = before.reshape(after.shape).copy()
    for source, target in zip(copies.sources, copies.targets, strict=True):
        expected[target] = before.reshape(after.shape)[source]
    np.testing.assert_array_equal(after, expected)


def test_copies_of_a_plan_whose_hits_end_at_whole_blocks_are_refused():
    copies = BlockCopies(np.array([1], np.int32), np.array([2], np.int32))
    with pytest.raises(JaxkvError, match="1 blocks are to be copied"):
        BlockCopier(SLOTS).run(jnp.asarray(pool(4)), copies)
