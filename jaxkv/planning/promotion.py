"""Accounting window and chunked layers as full attention: the hybrid manager switched off, or a way out.

Memory is then paid for every token of every layer. The layers still compute with their window or chunk, which
the promoted spec records.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jaxkv.errors import JaxkvError
from jaxkv.planning.compatibility import is_context_parallel, merged, one_type
from jaxkv.planning.plan import PlanConfig
from jaxkv.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

Layers = Mapping[str, KVCacheSpec]


class AccountedLayers(NamedTuple):
    """The layers as a policy is to group them, and what a user should know of it."""

    layers: Layers
    notes: tuple[str, ...]


def layers_to_account(layers: Layers, config: PlanConfig) -> AccountedLayers:
    """The layers as they are, or as one type where `config` switches the hybrid manager off.

    Raises JaxkvError where it cannot be off.
    """
    if not config.disable_hybrid_kv_cache_manager:
        return AccountedLayers(layers, ())
    as_one = without_hybrid_manager(layers)
    if as_one == dict(layers):
        return AccountedLayers(as_one, ())
    return AccountedLayers(as_one, ("the hybrid manager is off: window and chunked layers keep every token",))


def without_hybrid_manager(layers: Layers) -> dict[str, KVCacheSpec]:
    """The layers as one type: what `disable_hybrid_kv_cache_manager` asks for.

    Attention that decode context parallelism copies to every rank is promoted apart from the rest. Raises
    JaxkvError where that is impossible (recurrent layers, windows without any full attention layer).
    """
    result = dict(layers)
    for copied in (True, False):
        part = {name: spec for name, spec in layers.items() if _is_copied(spec) == copied}
        if part:
            result.update(promoted(part))
    return result


def _is_copied(spec: KVCacheSpec) -> bool:
    return isinstance(spec, AttentionSpec) and not is_context_parallel(spec)


def promoted(layers: Layers) -> dict[str, KVCacheSpec]:
    """The layers with windows and chunks made full attention; unchanged where they are of one type already.

    Raises JaxkvError where the result would still be of several types.
    """
    if _is_one_type(layers):
        return dict(layers)
    full_blocks = {spec.block_size for spec in layers.values() if isinstance(spec, FullAttentionSpec)}
    result = dict(layers)
    if full_blocks:
        shared_block = full_blocks.pop() if len(full_blocks) == 1 else None
        result = {name: _as_full(spec, shared_block) for name, spec in layers.items()}
    if not _is_one_type(result):
        kinds = sorted({spec.kind for spec in layers.values()})
        raise JaxkvError(
            f"layers of kinds {', '.join(kinds)} cannot be accounted as one full attention group; "
            "leave disable_hybrid_kv_cache_manager off for this model"
        )
    return result


def _is_one_type(layers: Layers) -> bool:
    specs = list(layers.values())
    return merged(specs) is not None or one_type(specs)


def _as_full(spec: KVCacheSpec, block_size: int | None) -> KVCacheSpec:
    """The spec accounted as full attention, with full attention's own block size where there is one."""
    if not isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return spec
    block_size = block_size or spec.block_size
    shared = {f.name: getattr(spec, f.name) for f in dataclasses.fields(AttentionSpec)}
    shared["block_size"] = block_size
    if isinstance(spec, SlidingWindowMLASpec):
        # The constructor pads to the alignment by itself.
        shared["page_size_padded"] = _padding_at(spec, block_size) if spec.alignment is None else None
        return MLASpec(**shared, sliding_window=spec.sliding_window, alignment=spec.alignment)
    shared["page_size_padded"] = _padding_at(spec, block_size)
    if isinstance(spec, SlidingWindowSpec):
        return FullAttentionSpec(**shared, sliding_window=spec.sliding_window)
    return FullAttentionSpec(**shared, attention_chunk_size=spec.attention_chunk_size)


def _padding_at(spec: AttentionSpec, block_size: int) -> int | None:
    """The padded page size at another block size: never smaller than the content."""
    if spec.page_size_padded is None:
        return None
    return max(spec.page_size_padded, spec.unpadded_page_size_bytes * block_size // spec.block_size)
