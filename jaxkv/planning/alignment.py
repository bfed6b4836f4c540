"""On which lengths prefix hits fall."""

import itertools
from collections.abc import Iterable, Sequence
from math import lcm
from typing import TYPE_CHECKING

from jaxkv.specs import AttentionSpec, ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec

if TYPE_CHECKING:
    from jaxkv.planning.plan import CacheGroup


def effective_block_size(spec: KVCacheSpec, context_parallel_size: int) -> int:
    """Tokens under one block id of all ranks together."""
    if isinstance(spec, AttentionSpec) and spec.dcp_sharded:
        return spec.block_size * context_parallel_size
    return spec.block_size


def whole_block_alignment(
    groups: Iterable["CacheGroup"], hash_block_size: int, context_parallel_size: int
) -> int:
    """Tokens on whose multiples every group can serve a hit that ends with whole blocks.

    The least common multiple of the groups' blocks. Rings, encoder outputs, recurrent states (kept at any
    position) and windows of one token (which need nothing) do not count. A local chunk can be served at its
    end too, where it needs no block: of blocks and chunks those are taken that make the multiple smallest.
    """
    choices = {_steps(group, hash_block_size, context_parallel_size) for group in groups}
    return min(lcm(hash_block_size, *steps) for steps in itertools.product(*choices))


def _steps(group: "CacheGroup", hash_block_size: int, context_parallel_size: int) -> Sequence[int]:
    """Lengths on whose multiples the group can serve a hit."""
    spec = group.spec
    if not spec.prefix_cacheable or not isinstance(spec, AttentionSpec):
        return (1,)
    if isinstance(spec, SlidingWindowSpec) and spec.num_retained_tokens == 0:
        return (1,)
    block = effective_block_size(spec, context_parallel_size)
    if isinstance(spec, ChunkedLocalAttentionSpec) and not group.is_eagle_group:
        chunk = spec.attention_chunk_size
        return (block,) if chunk % hash_block_size else (block, chunk)
    return (block,)
