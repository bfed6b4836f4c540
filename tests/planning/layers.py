"""Short ways to write layers."""

from jaxkv.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
)

PAGE = 16 * 2 * (64 + 64) * 2
"""Bytes of the attention specs below at a block of 16 tokens: 2 heads of 64 + 64 bfloat16 elements."""


def full(block_size: int = 16, heads: int = 2) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=64)


def window(size: int = 64, block_size: int = 16, heads: int = 2) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, num_kv_heads=heads, head_size=64, sliding_window=size)


def chunked(size: int = 128, block_size: int = 16) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block_size, num_kv_heads=2, head_size=64, attention_chunk_size=size
    )


def mamba(state_bytes: int = PAGE, block_size: int = 16, mode: str = "align") -> MambaSpec:
    return MambaSpec(block_size=block_size, shapes=((state_bytes,),), dtypes=("int8",), mamba_cache_mode=mode)


def mla(block_size: int = 16, rank: int = 576) -> MLASpec:
    return MLASpec(block_size=block_size, head_size=rank)


def layers(*runs: tuple[int, str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """(count, prefix, spec) runs as layers prefix.0, prefix.1, ..."""
    return {f"{prefix}.{i}": spec for count, prefix, spec in runs for i in range(count)}
