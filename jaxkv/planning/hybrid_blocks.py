"""Policy `unified` for recurrent models: attention blocks grow until their page covers a recurrent state."""

from collections.abc import Mapping
from typing import NamedTuple

from jaxkv.specs import AttentionSpec, FullAttentionSpec, KVCacheSpec, MambaSpec, MLASpec, cdiv

MLA_BLOCK_GRANULARITY = 128
"""Tokens: vLLM's MLA decode kernels want blocks of whole multiples of this beside recurrent layers."""


class AlignedLayers(NamedTuple):
    layers: dict[str, KVCacheSpec]
    notes: tuple[str, ...]


def align_hybrid_blocks(layers: Mapping[str, KVCacheSpec]) -> AlignedLayers:
    """The layers with one block size for which an attention page is at least as large as the largest state.

    The block grows in steps of the attention layers' own block size (128 tokens for MLA); full attention
    decides where there are several kinds. Recurrent layers that keep states for reuse take the same block.
    Models without both kinds, or whose attention page is large enough, stay as they are. This is what vLLM
    does when it reads a model's configuration, before it plans.
    """
    attention = [spec for spec in layers.values() if isinstance(spec, AttentionSpec)]
    states = [spec.state_size_bytes for spec in layers.values() if isinstance(spec, MambaSpec)]
    if not attention or not states:
        return AlignedLayers(dict(layers), ())
    leading = next((spec for spec in attention if isinstance(spec, FullAttentionSpec)), attention[0])
    step = leading.block_size
    if isinstance(leading, MLASpec):
        step = max(step, MLA_BLOCK_GRANULARITY)
    step_bytes = cdiv(leading.unpadded_page_size_bytes * step, leading.block_size)
    block = max(step * cdiv(max(states), step_bytes), leading.block_size)
    if block == leading.block_size:
        return AlignedLayers(dict(layers), ())
    note = (
        f"blocks grow from {leading.block_size} to {block} tokens so that an attention page covers a "
        f"recurrent state of {max(states)} bytes; prefixes below {block} tokens cannot hit"
    )
    return AlignedLayers({name: _with_block(spec, block) for name, spec in layers.items()}, (note,))


def _with_block(spec: KVCacheSpec, block_size: int) -> KVCacheSpec:
    fixed_block = isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none"
    return spec if fixed_block else spec.with_block_size(block_size)
