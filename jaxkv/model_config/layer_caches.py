"""What one layer of a model keeps, before block size, dtype and tensor parallelism are chosen."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from jaxkv.errors import JaxkvError
from jaxkv.kv_cache_dtype import scale_bytes
from jaxkv.model_config.parallel import replicated_heads, split_evenly
from jaxkv.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
)


class CacheChoices(NamedTuple):
    """block_size: tokens. dtype: of keys and values. conv_dtype, state_dtype: of a recurrent state's two
    parts. tensor_parallel: chips over which heads are divided.
    """

    block_size: int
    dtype: str
    conv_dtype: str
    state_dtype: str
    tensor_parallel: int = 1


@dataclass(frozen=True, kw_only=True)
class AttentionCache:
    """Keys and values. kind: "full", "sliding_window" or "chunked_local"; reach: tokens, None for full."""

    part: ClassVar[str] = "attention"

    kind: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    reach: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise JaxkvError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads: every KV head "
                "serves the same number"
            )

    def spec(self, choices: CacheChoices) -> KVCacheSpec:
        """The spec on one chip. KV heads are copied where there are fewer than chips."""
        shape = {
            "block_size": choices.block_size,
            "num_kv_heads": replicated_heads(self.num_heads, self.num_kv_heads, choices.tensor_parallel),
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
            "dtype": choices.dtype,
            "kv_quant_scale_bytes": scale_bytes(choices.dtype),
        }
        if self.kind == "sliding_window":
            return SlidingWindowSpec(**shape, sliding_window=self.reach or 0)
        if self.kind == "chunked_local":
            return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=self.reach or 0)
        return FullAttentionSpec(**shape)


@dataclass(frozen=True, kw_only=True)
class LatentCache:
    """One latent vector of `width` elements a token (MLA), the same on every chip."""

    part: ClassVar[str] = "attention"
    kind: ClassVar[str] = "mla"

    width: int

    def spec(self, choices: CacheChoices) -> KVCacheSpec:
        """The spec on one chip; tensor parallelism copies it.

        vLLM packs a pair of scales behind a latent of 8 bits, as if it had two sides
        (`MLACommonBackend.customize_spec`, 0.33).
        """
        return MLASpec(
            block_size=choices.block_size,
            head_size=self.width,
            dtype=choices.dtype,
            kv_quant_scale_bytes=scale_bytes(choices.dtype),
        )


@dataclass(frozen=True, kw_only=True)
class IndexerCache:
    """The keys by which sparse attention picks tokens: float8 with a float32 scale for every 128 elements."""

    part: ClassVar[str] = "indexer"
    kind: ClassVar[str] = "mla"

    width: int

    def spec(self, choices: CacheChoices) -> KVCacheSpec:
        """The spec on one chip; tensor parallelism copies it."""
        return MLASpec(
            block_size=choices.block_size,
            head_size=self.width,
            dtype="float8_e4m3fn",
            kv_quant_scale_bytes=4 * -(-self.width // 128),
        )


class StateTensor(NamedTuple):
    """One tensor of a recurrent state.

    name: "conv" or "state", which have dtypes of their own.
    split: heads or channels, divided among the chips.
    fixed: the other sizes.
    num_groups, group_size: channels that heads share (Mamba 2's B and C): whole groups go to chips, and are
    copied where there are fewer groups than chips.
    """

    name: str
    split: int
    fixed: tuple[int, ...]
    num_groups: int = 0
    group_size: int = 0

    def shape(self, tensor_parallel: int) -> tuple[int, ...]:
        """Sizes on one chip. Raises JaxkvError where they cannot be divided."""
        own = split_evenly(f"the {self.name} part of a recurrent state", self.split, tensor_parallel)
        if self.num_groups:
            own += self.group_size * replicated_heads(self.split, self.num_groups, tensor_parallel)
        return (own, *self.fixed)


@dataclass(frozen=True, kw_only=True)
class StateCache:
    """A recurrent state of fixed size."""

    part: ClassVar[str] = "state"
    kind: ClassVar[str] = "mamba"

    tensors: tuple[StateTensor, ...]

    def spec(self, choices: CacheChoices) -> KVCacheSpec:
        """The spec on one chip. Raises JaxkvError where tensor parallelism does not divide the heads."""
        dtypes = {"conv": choices.conv_dtype, "state": choices.state_dtype}
        return MambaSpec(
            block_size=choices.block_size,
            shapes=tuple(tensor.shape(choices.tensor_parallel) for tensor in self.tensors),
            dtypes=tuple(dtypes[tensor.name] for tensor in self.tensors),
        )


LayerCache = AttentionCache | LatentCache | IndexerCache | StateCache
