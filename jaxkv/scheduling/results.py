"""Checks of what a step's results say, before anything is made of them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxkv.errors import JaxkvError
from jaxkv.request import MAX_TOKEN_ID
from jaxkv.request_table import NO_TOKEN, RequestTable
from jaxkv.scheduling.output import SchedulerOutput

SampledTokens = NDArray[np.int32] | Sequence[int] | Sequence[Sequence[int]]


def check_sampled(output: SchedulerOutput, sampled: SampledTokens) -> NDArray[np.int32]:
    """int32[m]: one token for each of the m rows that sample in a step without drafts. JaxkvError for
    anything else.
    """
    tokens = _integers(output, sampled)
    if tokens.shape != (len(output.sampling),):
        raise JaxkvError(
            f"step {output.step} samples {len(output.sampling)} tokens, got an array of shape {tokens.shape}"
        )
    return _in_range(output, tokens, 0)


def check_verified(output: SchedulerOutput, table: RequestTable, sampled: SampledTokens) -> NDArray[np.int32]:
    """int32[m, w]: the tokens of the m rows that sample in a step with drafts, NO_TOKEN after a row's last.

    Each row has those of its drafts that the model confirmed, from the first on, and one token more.
    JaxkvError for anything else; for rows whose request has ended meanwhile only the shape counts.
    """
    assert output.num_drafts is not None
    rows, num_drafts = output.rows[output.sampling], output.num_drafts[output.sampling]
    if not isinstance(sampled, np.ndarray):
        sampled = _padded(sampled)
    tokens = _integers(output, sampled)
    if tokens.ndim != 2 or len(tokens) != len(rows) or not tokens.shape[1]:
        raise JaxkvError(
            f"step {output.step} samples tokens for {len(rows)} rows and has drafts: it needs a list of "
            f"tokens for each, got an array of shape {tokens.shape}"
        )
    tokens = _in_range(output, tokens, NO_TOKEN)
    counts = (tokens != NO_TOKEN).sum(axis=1)
    places = np.arange(tokens.shape[1])
    gaps = ((tokens != NO_TOKEN) != (places < counts[:, None])).any(axis=1)
    wrong = gaps | (counts < 1) | (counts > num_drafts + 1)
    if wrong.any():
        row = int(wrong.argmax())
        raise JaxkvError(
            f"row {row} of those that sample in step {output.step} has {num_drafts[row]} drafts: it must "
            f"get 1 to {num_drafts[row] + 1} tokens, padded at the end, not {tokens[row].tolist()}"
        )
    drafts = table.drafts(rows, max(int(num_drafts.max()), tokens.shape[1] - 1))
    confirmed = places[:-1] < counts[:, None] - 1
    live = table.epoch[rows] == output.epochs[output.sampling]
    wrong = (confirmed & (tokens[:, :-1] != drafts[:, : len(places) - 1])).any(axis=1) & live
    if wrong.any():
        row = int(wrong.argmax())
        raise JaxkvError(
            f"row {row} of those that sample in step {output.step} got "
            f"{tokens[row, : counts[row]].tolist()}; all but the last must be its drafts "
            f"{drafts[row, : num_drafts[row]].tolist()}"
        )
    return tokens


def _padded(sampled: Sequence[int] | Sequence[Sequence[int]]) -> NDArray | Sequence[int]:
    """Lists of different lengths as one array; anything else stays what it is."""
    lists = [row for row in sampled if isinstance(row, Sequence)]
    if not lists or len(lists) < len(sampled):
        return np.asarray(sampled, None if not lists else np.object_)
    width = max(1, *map(len, lists))
    return np.array([[*row, *[NO_TOKEN] * (width - len(row))] for row in lists])


def _integers(output: SchedulerOutput, sampled: SampledTokens) -> NDArray:
    try:
        tokens = np.asarray(sampled)
    except (ValueError, OverflowError) as error:
        raise JaxkvError(f"the tokens of step {output.step} are no list of token ids: {error}") from None
    if tokens.dtype.kind not in "iu" and tokens.size:
        raise JaxkvError(f"the tokens of step {output.step} must be integers, got dtype {tokens.dtype}")
    return tokens


def _in_range(output: SchedulerOutput, tokens: NDArray, lowest: int) -> NDArray[np.int32]:
    if tokens.size:
        low, high = int(np.minimum.reduce(tokens, None)), int(np.maximum.reduce(tokens, None))
        if low < lowest or high > MAX_TOKEN_ID:
            index = int(tokens.argmin() if low < lowest else tokens.argmax())
            raise JaxkvError(
                f"token id {low if low < lowest else high} at index {index} of step {output.step} is not in "
                f"[{lowest}, {MAX_TOKEN_ID}]"
            )
    return tokens.astype(np.int32, copy=False)
