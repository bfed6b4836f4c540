"""What one layer keeps in the cache: its kind, shapes, dtype and bytes. Nothing about how it computes.

A spec answers two questions. How many bytes does one page (one layer's part of one block) take, and how
many blocks does one request hold at once at the most? The second answer is exact, not an estimate: it sizes
the pool, gates admission and gives the width of the block tables, so a bound that is too small would
dead-lock an engine.
"""

from jaxkv.checks import check_int
from jaxkv.specs.attention import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from jaxkv.specs.base import KVCacheSpec, RequestLimits, blocks_touched, cdiv
from jaxkv.specs.state import MAMBA_CACHE_MODES, CrossAttentionSpec, MambaSpec, ScratchSpec

__all__ = [
    "MAMBA_CACHE_MODES",
    "SPEC_KINDS",
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "FullAttentionSpec",
    "KVCacheSpec",
    "MLASpec",
    "MambaSpec",
    "RequestLimits",
    "ScratchSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "blocks_touched",
    "cdiv",
    "check_int",
]

SPEC_KINDS: dict[str, type[KVCacheSpec]] = {
    spec.kind: spec
    for spec in (
        FullAttentionSpec,
        SlidingWindowSpec,
        ChunkedLocalAttentionSpec,
        MLASpec,
        SlidingWindowMLASpec,
        MambaSpec,
        CrossAttentionSpec,
        ScratchSpec,
    )
}
"""The class of each kind, by the name that scenarios and plans use."""
