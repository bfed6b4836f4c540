"""Which layers can share a group: those of one spec, or of one type whose pages differ in size only.

The rules are vLLM's, so that policy `unified` forms the groups that vLLM forms.
"""

import dataclasses
from collections.abc import Sequence

from jaxkv.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    ScratchSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

# The first layer's class decides which classes may join it.
_TYPE_FAMILY: dict[type[KVCacheSpec], type[KVCacheSpec]] = {
    FullAttentionSpec: FullAttentionSpec,
    MLASpec: FullAttentionSpec,
    SlidingWindowSpec: SlidingWindowSpec,
    SlidingWindowMLASpec: SlidingWindowMLASpec,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionSpec,
    MambaSpec: MambaSpec,
    CrossAttentionSpec: CrossAttentionSpec,
    ScratchSpec: ScratchSpec,
}

# What must agree, beside the class, for layers to hold the same blocks at all times.
_TYPE_FIELDS: dict[type[KVCacheSpec], tuple[str, ...]] = {
    SlidingWindowSpec: ("sliding_window", "num_retained_tokens"),
    SlidingWindowMLASpec: ("sliding_window", "num_retained_tokens"),
    ChunkedLocalAttentionSpec: ("attention_chunk_size",),
    MambaSpec: (
        "num_speculative_blocks",
        "num_prefill_checkpoint_blocks",
        "mamba_cache_mode",
        "page_size_bytes",
    ),
}


def merged(specs: Sequence[KVCacheSpec]) -> KVCacheSpec | None:
    """The one spec that stands for all of `specs`, or None where they are not alike.

    Full attention layers that differ only in what they attend to (`sliding_window` or `attention_chunk_size`,
    known where the hybrid manager is off) are alike as long as there is one such size.
    """
    first = specs[0]
    if all(spec == first for spec in specs):
        return first
    if any(type(spec) is not type(first) for spec in specs) or not isinstance(first, FullAttentionSpec):
        return None
    plain = {dataclasses.replace(s, sliding_window=None, attention_chunk_size=None) for s in _full(specs)}
    windows = {s.sliding_window for s in _full(specs)} - {None}
    chunks = {s.attention_chunk_size for s in _full(specs)} - {None}
    if len(plain) > 1 or len(windows) + len(chunks) > 1:
        return None
    return dataclasses.replace(
        plain.pop(),
        sliding_window=windows.pop() if windows else None,
        attention_chunk_size=chunks.pop() if chunks else None,
    )


def _full(specs: Sequence[KVCacheSpec]) -> list[FullAttentionSpec]:
    return [spec for spec in specs if isinstance(spec, FullAttentionSpec)]


def one_type(specs: Sequence[KVCacheSpec]) -> bool:
    """Whether layers of these specs always hold the same blocks, so that one block table serves them all."""
    first = specs[0]
    family = _TYPE_FAMILY.get(type(first), type(first))
    names = ("block_size", "prefix_cacheable", *_TYPE_FIELDS.get(type(first), ()))
    return all(
        isinstance(spec, family)
        and is_context_parallel(spec) == is_context_parallel(first)
        and all(getattr(spec, name) == getattr(first, name) for name in names)
        for spec in specs
    )


def is_context_parallel(spec: KVCacheSpec) -> bool:
    """Whether decode context parallelism spreads the layer's tokens over ranks."""
    return isinstance(spec, AttentionSpec) and spec.dcp_sharded
