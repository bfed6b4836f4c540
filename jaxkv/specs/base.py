"""What all kinds of cache have in common, and the limits of one request."""

import dataclasses
from dataclasses import dataclass, field
from math import gcd
from typing import ClassVar, Self

from jaxkv.checks import check_bool, check_int
from jaxkv.errors import JaxkvError


def cdiv(a: int, b: int) -> int:
    """ceil(a / b) for a >= 0 and b > 0."""
    return -(-a // b)


def blocks_touched(num_tokens: int, block_size: int, start_granularity: int = 1) -> int:
    """The most blocks that `num_tokens` contiguous tokens can touch.

    The run may start at any multiple of `start_granularity`. The worst start within a block is then
    block_size - gcd(block_size, start_granularity), hence ceil((num_tokens + block_size - gcd) / block_size).
    With `start_granularity` 1 this is floor((m-2)/B)+2 for m >= 2 tokens and 1 for one token.
    """
    if num_tokens <= 0:
        return 0
    return cdiv(num_tokens + block_size - gcd(block_size, start_granularity), block_size)


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What bounds the size of one request, whatever its layers.

    max_model_len: tokens of prompt and answer together.
    max_in_flight_tokens: tokens scheduled whose step has not been settled (one batch, or two if steps
    overlap).
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

    block_size: tokens in one block. For a recurrent layer: the distance between positions where a state may
    be kept.
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
        check_bool("prefix_cacheable", self.prefix_cacheable)
        check_bool("is_draft", self.is_draft)
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
        """Kernels that walk a table by token want its width to cover a multiple of this;
        None: not by token.
        """
        return 128

    def max_blocks_per_request(self, limits: RequestLimits) -> int:
        """The most blocks (for a recurrent kind: states) one request holds at once, exactly."""
        raise NotImplementedError

    def admission_blocks(self, num_tokens: int, limits: RequestLimits) -> int:
        """The most blocks held at once by a request that grows to `num_tokens` tokens (clipped to the
        maximum).
        """
        num_tokens = min(num_tokens, limits.max_model_len)
        return self.max_blocks_per_request(dataclasses.replace(limits, max_model_len=max(num_tokens, 1)))

    def max_memory_bytes(self, limits: RequestLimits) -> int:
        """The most bytes one request holds in one layer of this spec."""
        return self.max_blocks_per_request(limits) * self.page_size_bytes

    def with_block_size(self, block_size: int) -> Self:
        """The same spec with another number of tokens a block. A padded page keeps its padded size."""
        return dataclasses.replace(self, block_size=block_size)

    def padded_to(self, page_size_bytes: int) -> Self:
        """The same spec with its page made `page_size_bytes` large;
        JaxkvError if the content does not fit.
        """
        return dataclasses.replace(self, page_size_padded=page_size_bytes)
