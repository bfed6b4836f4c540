"""The few shapes that a step may have: a short list fixed at start-up, so that nothing compiles later."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxkv.errors import JaxkvError

SMALLEST_PREFILL = 16
PREFILL_GROWTH = 4


class Bucket(NamedTuple):
    """The padded shape of one step: `num_tokens` token positions in at most `num_seqs` sequences."""

    num_tokens: int
    num_seqs: int

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens in up to {self.num_seqs} sequences"


def make_buckets(
    *, max_num_seqs: int, max_num_batched_tokens: int, prefill_tokens: Sequence[int] | None = None
) -> tuple[Bucket, ...]:
    """The shapes of an engine, ascending: one token a sequence for powers of two of sequences, and longer
    steps for prefill chunks beside any number of sequences, growing by `PREFILL_GROWTH`; both end at the
    maximum.

    `prefill_tokens` replaces the prefill sizes; the maximum is added where it is missing.
    """
    if max_num_seqs < 1:
        raise JaxkvError(f"max_num_seqs must be at least 1, not {max_num_seqs}")
    if max_num_batched_tokens < max_num_seqs:
        raise JaxkvError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs "
            f"({max_num_seqs}): a step decodes one token of each running request"
        )
    if prefill_tokens is None:
        prefill_tokens = _growing(SMALLEST_PREFILL, PREFILL_GROWTH, max_num_batched_tokens)
    wrong = [n for n in prefill_tokens if not 1 <= n <= max_num_batched_tokens]
    if wrong:
        raise JaxkvError(
            f"a prefill bucket must be from 1 to {max_num_batched_tokens} tokens, not {wrong[0]}"
        )
    shapes = {Bucket(n, n) for n in _growing(1, 2, max_num_seqs)}
    shapes |= {Bucket(n, min(n, max_num_seqs)) for n in (*prefill_tokens, max_num_batched_tokens)}
    return tuple(sorted(shapes))


def pick_bucket(buckets: Sequence[Bucket], *, num_tokens: int, num_seqs: int) -> Bucket:
    """The smallest of `buckets` (ascending) that holds the step. Raises JaxkvError where none does."""
    for bucket in buckets:
        if num_tokens <= bucket.num_tokens and num_seqs <= bucket.num_seqs:
            return bucket
    raise JaxkvError(
        f"a step of {num_tokens} tokens in {num_seqs} sequences fits no bucket; "
        f"the largest holds {buckets[-1]}"
    )


def _growing(first: int, factor: int, last: int) -> list[int]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return [*sizes, last]
