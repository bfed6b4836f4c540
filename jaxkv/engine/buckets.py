"""The few shapes that a step may have: a short list fixed at start-up, so that nothing compiles later."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxkv.checks import check_int
from jaxkv.errors import JaxkvError

SMALLEST_PREFILL = 16
GROWTH = 4
"""From one size to the next. A step padded to four times its rows takes little longer (a decode reads all
weights anyway), while every size takes seconds to compile."""
MAX_STEP_TOKENS = 2**20
"""Tokens of the largest step: the host keeps rows, and the device activations, for all of them."""


class Bucket(NamedTuple):
    """The padded shape of one step: `num_tokens` token positions in at most `num_seqs` sequences.

    decode_only: every sequence has one token; steps with prefill chunks do not fit.
    """

    num_tokens: int
    num_seqs: int
    decode_only: bool

    def holds(self, num_tokens: int, num_seqs: int) -> bool:
        """Whether a step of so many tokens and sequences fits."""
        fits = num_tokens <= self.num_tokens and num_seqs <= self.num_seqs
        return fits and (num_tokens == num_seqs or not self.decode_only)

    def __str__(self) -> str:
        if self.decode_only:
            return f"{self.num_seqs} decodes"
        return f"{self.num_tokens} tokens in up to {self.num_seqs} sequences"


def make_buckets(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    decode_seqs: Sequence[int] | None = None,
    prefill_tokens: Sequence[int] | None = None,
) -> tuple[Bucket, ...]:
    """The shapes of an engine: decodes of 1, 4, 16, ... sequences, then steps with prefill chunks; each kind
    ascending, growing by `GROWTH` and ending at the maximum.

    decode_seqs, prefill_tokens: sizes to use instead; the maximum is added where it is missing.
    """
    for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
        check_int(name, value, 1, MAX_STEP_TOKENS)
    if max_num_batched_tokens < max_num_seqs:
        raise JaxkvError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs "
            f"({max_num_seqs}): a step decodes one token of each running request"
        )
    if decode_seqs is None:
        decode_seqs = _growing(1, GROWTH, max_num_seqs)
    if prefill_tokens is None:
        prefill_tokens = _growing(SMALLEST_PREFILL, GROWTH, max_num_batched_tokens)
    decodes = _sizes("decode bucket", decode_seqs, max_num_seqs)
    prefills = _sizes("prefill bucket", prefill_tokens, max_num_batched_tokens)
    return (
        *(Bucket(n, n, True) for n in decodes),
        *(Bucket(n, min(n, max_num_seqs), False) for n in prefills),
    )


def pick_bucket(buckets: Sequence[Bucket], *, num_tokens: int, num_seqs: int) -> Bucket:
    """The first of `buckets`, as `make_buckets` orders them, that holds the step. JaxkvError: none does."""
    for bucket in buckets:
        if bucket.holds(num_tokens, num_seqs):
            return bucket
    raise JaxkvError(
        f"a step of {num_tokens} tokens in {num_seqs} sequences fits no bucket; "
        f"the largest holds {buckets[-1]}"
    )


def _sizes(what: str, sizes: Any, largest: int) -> list[int]:
    if not isinstance(sizes, Sequence):
        raise JaxkvError(f"the sizes of {what}s must be a list, not {sizes!r}")
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= largest:
            raise JaxkvError(f"a {what} must be an integer from 1 to {largest}, not {size!r}")
    return sorted({*sizes, largest})


def _growing(first: int, factor: int, last: int) -> list[int]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return [*sizes, last]
