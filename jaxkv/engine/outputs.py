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
class CacheHit:
    """What a prompt found in the cache, and why it was not more.

    tokens_by_group: prompt tokens that each group of layers could have served by itself. limited_by: the
    group (of `LLM.plan.groups`) that made the hit shorter than another group could serve, and limited_by_kind
    the kind of its layers; None where all could serve the same. lost_tokens: by how much.
    """

    tokens_by_group: tuple[int, ...]
    limited_by: int | None
    limited_by_kind: str | None
    lost_tokens: int


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A finished request (or an aborted one, with what it had).

    text: the generated text; a stop string and what follows it are cut off. token_ids: every generated token,
    the end token included. num_cached_tokens: prompt tokens that were found in the cache and not computed.
    cache_hit: how that came about; None for a request that never began.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_cached_tokens: int
    cache_hit: CacheHit | None
    logprobs: tuple[TokenLogprobs, ...] | None
    metrics: RequestMetrics


@dataclass(frozen=True, kw_only=True)
class RequestDelta:
    """What one step added to one request: new text and tokens, and the whole output once it has ended."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None
