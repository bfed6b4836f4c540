"""Layers that keep a fixed amount: recurrent states, the encoder's output, scratch rings."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from jaxkv.checks import check_all, check_int
from jaxkv.dtypes import itemsize
from jaxkv.errors import JaxkvError
from jaxkv.specs.attention import AttentionSpec
from jaxkv.specs.base import KVCacheSpec, RequestLimits, cdiv

MAMBA_CACHE_MODES = ("none", "align")


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """A recurrent state of fixed size: Mamba 1 and 2, gated DeltaNet, short convolutions, RG-LRU.

    shapes, dtypes: the tensors of one state, for one layer.
    block_size: positions that are multiples of it may keep a state for reuse. Bytes do not depend on it.
    mamba_cache_mode: "align" keeps states at block boundaries for prefix caching, "none" only the running
    state.
    num_speculative_blocks: states kept for drafts that may be rejected.
    num_prefill_checkpoint_blocks: states a prefill may write besides the one at its end.
    """

    kind: ClassVar[str] = "mamba"

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    mamba_cache_mode: str = "align"
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0

    def _check(self) -> None:
        check_all("shapes", self.shapes, Sequence)
        check_all("dtypes", self.dtypes, str)
        object.__setattr__(self, "shapes", tuple(tuple(shape) for shape in self.shapes))
        object.__setattr__(self, "dtypes", tuple(self.dtypes))
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise JaxkvError(
                f"{len(self.shapes)} shapes need as many dtypes and at least one, not {self.dtypes!r}"
            )
        for shape in self.shapes:
            for size in shape:
                check_int(f"every size in shapes {self.shapes}", size, 1)
        for dtype in self.dtypes:
            itemsize(dtype)
        if self.mamba_cache_mode not in MAMBA_CACHE_MODES:
            raise JaxkvError(f"mamba_cache_mode {self.mamba_cache_mode!r} is not one of {MAMBA_CACHE_MODES}")
        check_int("num_speculative_blocks", self.num_speculative_blocks, 0)
        check_int("num_prefill_checkpoint_blocks", self.num_prefill_checkpoint_blocks, 0)

    @property
    def tokens_per_state(self) -> int:
        """A state stands for all tokens before it: -1, as in vLLM."""
        return -1

    @property
    def state_size_bytes(self) -> int:
        """Bytes of one state of one layer."""
        return sum(prod(s) * itemsize(d) for s, d in zip(self.shapes, self.dtypes, strict=True))

    @property
    def unpadded_page_size_bytes(self) -> int:
        return self.state_size_bytes

    @property
    def block_table_token_alignment(self) -> int | None:
        return None

    def max_blocks_per_request(self, limits: RequestLimits) -> int:
        speculative = max(self.num_speculative_blocks, limits.num_speculative_blocks)
        if self.mamba_cache_mode == "none":
            return 1 + speculative
        checkpoints = max(self.num_prefill_checkpoint_blocks, limits.num_prefill_checkpoint_blocks)
        return 2 + speculative + checkpoints


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Keys and values of the encoder's tokens:
    allocated once, the size of the encoder's output, never shared.
    """

    kind: ClassVar[str] = "cross"

    prefix_cacheable: bool = False

    def _check(self) -> None:
        super()._check()
        if self.prefix_cacheable:
            raise JaxkvError("cross attention depends on the encoder's input: prefix_cacheable must be False")

    def max_blocks_per_request(self, limits: RequestLimits) -> int:
        return cdiv(limits.max_encoder_len, self.block_size)


@dataclass(frozen=True, kw_only=True)
class ScratchSpec(AttentionSpec):
    """One ring of block_size tokens for each request, written over and over; never shared."""

    kind: ClassVar[str] = "scratch"

    prefix_cacheable: bool = False

    def _check(self) -> None:
        super()._check()
        if self.prefix_cacheable:
            raise JaxkvError("a scratch ring is overwritten all the time: prefix_cacheable must be False")

    @property
    def block_table_token_alignment(self) -> int | None:
        return None

    def max_blocks_per_request(self, limits: RequestLimits) -> int:
        return 1
