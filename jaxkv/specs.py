"""What one layer keeps in the cache: its kind, shapes, dtype and bytes. Nothing about how it computes.

A spec answers two questions. How many bytes does one page (one layer's part of one block) take, and how many blocks
does one request hold at once at the most? The second answer is exact, not an estimate: it sizes the pool, gates
admission and gives the width of the block tables, so a bound that is too small would dead-lock an engine.
"""

import dataclasses
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd, prod
from typing import Any, ClassVar, Self

from jaxkv.dtypes import itemsize
from jaxkv.errors import JaxkvError


def cdiv(a: int, b: int) -> int:
    """ceil(a / b) for a >= 0 and b > 0."""
    return -(-a // b)


def check_int(name: str, value: Any, minimum: int) -> None:
    """Raises JaxkvError unless `value` is an int (not a bool) of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise JaxkvError(f"{name} must be an integer of at least {minimum}, not {value!r}")


def blocks_touched(num_tokens: int, block_size: int, start_granularity: int = 1) -> int:
    """The most blocks that `num_tokens` contiguous tokens can touch.

    The run may start at any multiple of `start_granularity`. The worst start within a block is then
    block_size - gcd(block_size, start_granularity), hence ceil((num_tokens + block_size - gcd) / block_size). With
    `start_granularity` 1 this is floor((m-2)/B)+2 for m >= 2 tokens and 1 for one token.
    """
    if num_tokens <= 0:
        return 0
    return cdiv(num_tokens + block_size - gcd(block_size, start_granularity), block_size)


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What bounds the size of one request, whatever its layers.

    max_model_len: tokens of prompt and answer together.
    max_in_flight_tokens: tokens scheduled whose step has not been settled (one batch, or two if steps overlap).
    num_lookahead_tokens: slots allocated beyond the scheduled tokens, for drafts.
    num_speculative_blocks, num_prefill_checkpoint_blocks: extra states of a recurrent layer.
    max_encoder_len: tokens of the encoder, for cross attention.
    decode_context_parallel_size: ranks over which a context-parallel cache is spread.
    """

    max_model_len: int
    max_in_flight_tokens: int
    num_lookahead_tokens: int = 0
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0
    max_encoder_len: int = 0
    decode_context_parallel_size: int = 1

    def __post_init__(self) -> None:
        check_int("max_model_len", self.max_model_len, 1)
        check_int("max_in_flight_tokens", self.max_in_flight_tokens, 1)
        check_int("decode_context_parallel_size", self.decode_context_parallel_size, 1)
        for name in ("num_lookahead_tokens", "num_speculative_blocks", "num_prefill_checkpoint_blocks"):
            check_int(name, getattr(self, name), 0)
        check_int("max_encoder_len", self.max_encoder_len, 0)


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """The base of all kinds.

    block_size: tokens in one block. For a recurrent layer: the distance between positions where a state may be kept.
    page_size_padded: bytes of a page where it is made larger than its content; None: no padding.
    prefix_cacheable: whether the group takes part in prefix caching.
    is_draft: a draft model owns the layer. Not part of equality: it never keeps layers out of a group.
    """

    kind: ClassVar[str] = ""

    block_size: int
    page_size_padded: int | None = None
    prefix_cacheable: bool = True
    is_draft: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, 1)
        self._check()
        if self.page_size_padded is not None:
            check_int("page_size_padded", self.page_size_padded, 1)
            if self.page_size_padded < self.unpadded_page_size_bytes:
                raise JaxkvError(
                    f"page_size_padded {self.page_size_padded} is smaller than the page's content of "
                    f"{self.unpadded_page_size_bytes} bytes"
                )

    def _check(self) -> None:
        """Validates the fields a kind adds; called before the page size is first computed."""

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of content of one page."""
        raise NotImplementedError

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page, with its padding."""
        return self.unpadded_page_size_bytes if self.page_size_padded is None else self.page_size_padded

    @property
    def block_table_token_alignment(self) -> int | None:
        """Kernels that walk a table by token want its width to cover a multiple of this; None: not by token."""
        return 128

    def max_blocks_per_request(self, limits: RequestLimits) -> int:
        """The most blocks (for a recurrent kind: states) one request holds at once, exactly."""
        raise NotImplementedError

    def admission_blocks(self, num_tokens: int, limits: RequestLimits) -> int:
        """The most blocks held at once by a request that grows to `num_tokens` tokens (clipped to the maximum)."""
        num_tokens = min(num_tokens, limits.max_model_len)
        return self.max_blocks_per_request(dataclasses.replace(limits, max_model_len=max(num_tokens, 1)))

    def max_memory_bytes(self, limits: RequestLimits) -> int:
        """The most bytes one request holds in one layer of this spec."""
        return self.max_blocks_per_request(limits) * self.page_size_bytes

    def with_block_size(self, block_size: int) -> Self:
        """The same spec with another number of tokens a block. A padded page keeps its padded size."""
        return dataclasses.replace(self, block_size=block_size)

    def padded_to(self, page_size_bytes: int) -> Self:
        """The same spec with its page made `page_size_bytes` large; JaxkvError if the content does not fit."""
        return dataclasses.replace(self, page_size_padded=page_size_bytes)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of every token.

    Page bytes = num_heads * num_states * state_content_size_bytes, where num_states = block_size / tokens_per_state
    and, unless stated otherwise, a state is (head_size + head_size_v) elements and its quantisation scales.

    head_size_v: None means head_size.
    num_head_slots: head slots of a page where packing differs from one slot per KV head.
    state_content_bytes: bytes of one (head slot, state) cell where packing differs from whole elements.
    kv_quant_scale_bytes: bytes of scales beside one cell (4 + 4 for float32 scales of K and V per token and head).
    tokens_per_state: tokens that one stored state covers; above 1 compresses, a fraction stores several per token.
    dcp_sharded: decode context parallelism spreads this cache's tokens over the ranks (a replicated draft: False).
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
                f"block_size {self.block_size} is not a whole number of states of {self.tokens_per_state} tokens"
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

    sliding_window, attention_chunk_size: what the layer really attends to where the hybrid manager is off and the
    layer is only accounted as full attention. Informative: they change no figure.
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

    num_lookahead_tokens: draft modules that may prefill the last num_lookahead_tokens - 1 tokens again; so many
    tokens below the window stay.
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
        # Blocks fall out of the window only once a step is settled, so the retained tokens, those in flight and the
        # slots of drafts are held together.
        in_flight = limits.max_in_flight_tokens + limits.num_lookahead_tokens
        return self._bounded(self.num_retained_tokens + in_flight, 1, limits)


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A token attends to the tokens of its own chunk of attention_chunk_size tokens, up to itself."""

    kind: ClassVar[str] = "chunked_local"

    attention_chunk_size: int

    def _check(self) -> None:
        super()._check()
        check_int("attention_chunk_size", self.attention_chunk_size, 1)

    def max_blocks_per_request(self, limits: RequestLimits) -> int:
        # At most attention_chunk_size - 1 tokens of the current chunk are computed: a full chunk is left behind.
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


@dataclass(frozen=True, kw_only=True)
class MLASpec(FullAttentionSpec):
    """One latent vector a token instead of keys and values: a single head, no separate V.

    alignment: bytes that a page must be a multiple of. Rows are addressed across pages, so a page takes no padding
    beyond that.
    """

    kind: ClassVar[str] = "mla"

    num_kv_heads: int = 1
    head_size_v: int | None = 0
    alignment: int | None = None

    def _check(self) -> None:
        super()._check()
        _round_up_page(self)


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


MAMBA_CACHE_MODES = ("none", "align")


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """A recurrent state of fixed size: Mamba 1 and 2, gated DeltaNet, short convolutions, RG-LRU.

    shapes, dtypes: the tensors of one state, for one layer.
    block_size: positions that are multiples of it may keep a state for reuse. Bytes do not depend on it.
    mamba_cache_mode: "align" keeps states at block boundaries for prefix caching, "none" only the running state.
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
    """Keys and values of the encoder's tokens: allocated once, the size of the encoder's output, never shared."""

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
