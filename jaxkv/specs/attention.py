"""Layers that keep something for every token: full, windowed, chunked and latent attention."""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Self

from jaxkv.checks import check_bool, check_int
from jaxkv.dtypes import itemsize
from jaxkv.errors import JaxkvError
from jaxkv.specs.base import KVCacheSpec, RequestLimits, blocks_touched, cdiv


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of every token.

    Page bytes = num_heads * num_states * state_content_size_bytes, where num_states = block_size /
    tokens_per_state and, unless stated otherwise, a state is (head_size + head_size_v) elements and its
    quantisation scales.

    head_size_v: None means head_size.
    num_head_slots: head slots of a page where packing differs from one slot per KV head.
    state_content_bytes: bytes of one (head slot, state) cell where packing differs from whole elements.
    kv_quant_scale_bytes: bytes of scales beside one cell (4 + 4 for float32 scales of K and V per token and
    head).
    tokens_per_state: tokens that one stored state covers; above 1 compresses, a fraction stores several per
    token.
    dcp_sharded: decode context parallelism spreads this cache's tokens over the ranks (a replicated draft:
    False).
    """

    num_kv_heads: int
    head_size: int
    dtype: str = "bfloat16"
    head_size_v: int | None = None
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    kv_quant_scale_bytes: int = 0
    tokens_per_state: int | Fraction = 1
    dcp_sharded: bool = True

    def _check(self) -> None:
        check_bool("dcp_sharded", self.dcp_sharded)
        check_int("num_kv_heads", self.num_kv_heads, 1)
        check_int("head_size", self.head_size, 1)
        itemsize(self.dtype)
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)
        check_int("head_size_v", self.head_size_v, 0)
        if self.num_head_slots is not None:
            check_int("num_head_slots", self.num_head_slots, 1)
        if self.state_content_bytes is not None:
            check_int("state_content_bytes", self.state_content_bytes, 1)
        check_int("kv_quant_scale_bytes", self.kv_quant_scale_bytes, 0)
        if not isinstance(self.tokens_per_state, int | Fraction) or self.tokens_per_state <= 0:
            raise JaxkvError(
                f"tokens_per_state must be a positive integer or Fraction, not {self.tokens_per_state!r}"
            )
        if (self.block_size / Fraction(self.tokens_per_state)).denominator != 1:
            raise JaxkvError(
                f"block_size {self.block_size} is not a whole number of states of "
                f"{self.tokens_per_state} tokens"
            )

    @property
    def num_heads(self) -> int:
        """Head slots of a page."""
        return self.num_kv_heads if self.num_head_slots is None else self.num_head_slots

    @property
    def num_states(self) -> int:
        """States stored in one page for each head slot."""
        return int(self.block_size / Fraction(self.tokens_per_state))

    @property
    def state_content_size_bytes(self) -> int:
        """Bytes of one (head slot, state) cell, with its quantisation scales."""
        if self.state_content_bytes is not None:
            return self.state_content_bytes + self.kv_quant_scale_bytes
        assert self.head_size_v is not None  # set by _check
        return (self.head_size + self.head_size_v) * itemsize(self.dtype) + self.kv_quant_scale_bytes

    @property
    def unpadded_page_size_bytes(self) -> int:
        return self.num_heads * self.num_states * self.state_content_size_bytes

    def max_tokens_per_rank(self, limits: RequestLimits) -> int:
        """The longest sequence, or one rank's share of it where context parallelism spreads the cache."""
        return cdiv(limits.max_model_len, limits.decode_context_parallel_size if self.dcp_sharded else 1)

    def _bounded(self, num_tokens: int, start_granularity: int, limits: RequestLimits) -> int:
        whole = cdiv(limits.max_model_len, self.block_size)
        return min(blocks_touched(num_tokens, self.block_size, start_granularity), whole)


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token of the sequence is kept.

    sliding_window, attention_chunk_size: what the layer really attends to where the hybrid manager is off and
    the layer is only accounted as full attention. Informative: they change no figure.
    """

    kind: ClassVar[str] = "full"

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def _check(self) -> None:
        super()._check()
        for name in ("sliding_window", "attention_chunk_size"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)

    def max_blocks_per_request(self, limits: RequestLimits) -> int:
        return cdiv(self.max_tokens_per_rank(limits), self.block_size)


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A token attends to itself and the sliding_window - 1 tokens before it.

    num_lookahead_tokens: draft modules that may prefill the last num_lookahead_tokens - 1 tokens again; so
    many tokens below the window stay.
    """

    kind: ClassVar[str] = "sliding_window"

    sliding_window: int
    num_lookahead_tokens: int = 0

    def _check(self) -> None:
        super()._check()
        check_int("sliding_window", self.sliding_window, 1)
        check_int("num_lookahead_tokens", self.num_lookahead_tokens, 0)

    @property
    def num_retained_tokens(self) -> int:
        """Tokens below the next one to compute that must stay readable."""
        return self.sliding_window - 1 + max(0, self.num_lookahead_tokens - 1)

    def max_blocks_per_request(self, limits: RequestLimits) -> int:
        # Blocks fall out of the window only once a step is settled, so the retained tokens, those in flight
        # and the slots of drafts are held together.
        in_flight = limits.max_in_flight_tokens + limits.num_lookahead_tokens
        return self._bounded(self.num_retained_tokens + in_flight, 1, limits)


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A token attends to the tokens of its own chunk of attention_chunk_size tokens, up to itself.

    Its bound on blocks may be one too high where the chunk that starts at the worst place in a block would
    end beyond the maximum length.
    """

    kind: ClassVar[str] = "chunked_local"

    attention_chunk_size: int

    def _check(self) -> None:
        super()._check()
        check_int("attention_chunk_size", self.attention_chunk_size, 1)

    def max_blocks_per_request(self, limits: RequestLimits) -> int:
        # At most attention_chunk_size - 1 tokens of the current chunk are computed: a full chunk is left
        # behind.
        in_flight = limits.max_in_flight_tokens + limits.num_lookahead_tokens
        return self._bounded(self.attention_chunk_size - 1 + in_flight, self.attention_chunk_size, limits)


def _round_up_page(spec: "MLASpec | SlidingWindowMLASpec") -> None:
    """Makes the page a whole number of `alignment` bytes, by padding."""
    if spec.alignment is None:
        return
    check_int("alignment", spec.alignment, 1)
    if spec.page_size_padded is None:
        padded = cdiv(spec.unpadded_page_size_bytes, spec.alignment) * spec.alignment
        if padded != spec.unpadded_page_size_bytes:
            object.__setattr__(spec, "page_size_padded", padded)


def _with_block_size[S: MLASpec | SlidingWindowMLASpec](spec: S, block_size: int) -> S:
    """A page that was rounded up to the alignment is rounded again; any other padding is kept."""
    padded = None if spec.alignment is not None else spec.page_size_padded
    return replace(spec, block_size=block_size, page_size_padded=padded)


@dataclass(frozen=True, kw_only=True)
class MLASpec(FullAttentionSpec):
    """One latent vector a token instead of keys and values: a single head, no separate V.

    alignment: bytes that a page must be a multiple of. Rows are addressed across pages, so a page takes no
    padding beyond that.
    """

    kind: ClassVar[str] = "mla"

    num_kv_heads: int = 1
    head_size_v: int | None = 0
    alignment: int | None = None

    def _check(self) -> None:
        super()._check()
        _round_up_page(self)

    def with_block_size(self, block_size: int) -> Self:
        return _with_block_size(self, block_size)


@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A latent cache of which only a window is kept."""

    kind: ClassVar[str] = "sliding_window_mla"

    num_kv_heads: int = 1
    head_size_v: int | None = 0
    alignment: int | None = None

    def _check(self) -> None:
        super()._check()
        _round_up_page(self)

    def with_block_size(self, block_size: int) -> Self:
        return _with_block_size(self, block_size)
