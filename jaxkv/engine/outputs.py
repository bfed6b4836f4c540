"""What the engine says about a request: while it runs (`RequestDelta`) and when it has ended
(`RequestOutput`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Natural log probabilities at one generated position, before temperature and filters.

    logprob: of the chosen token. top: the most likely token ids and theirs, best first.
    """

    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """Times of one request, in seconds. time_to_first_token counts from its arrival, waiting included."""

    time_to_first_token: float | None
    time_total: float
    num_preemptions: int


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A finished request (or an aborted one, with what it had).

    text: the generated text; a stop string and what follows it are cut off. token_ids: every generated token,
    the end token included. num_cached_tokens: prompt tokens that were found in the cache and not computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] | None
    metrics: RequestMetrics


@dataclass(frozen=True, kw_only=True)
class RequestDelta:
    """What one step added to one request: new text and tokens, and the whole output once it has ended."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None
