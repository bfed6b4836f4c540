"""How the tokens of one request are chosen, and when it ends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.errors import JaxkvError
from jaxkv.unicode_text import check_unicode

MAX_LOGPROBS = 20
"""Most alternatives a request may ask for at each position; the width of the arrays the step returns."""

MAX_BANNED_TOKENS = 16
"""Most end and stop tokens of a request with `min_tokens`; the width of an array that a step is given."""

MAX_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. Names and defaults are vLLM's.

    temperature: 0 takes the most likely token (greedy); else logits are divided by it.
    top_k: sample from the `top_k` most likely tokens; 0 means all. Tokens that tie with the last are kept.
    top_p: sample from the fewest tokens whose probability reaches `top_p` (after top_k); 1 means all.
    seed: the same seed gives the same tokens whatever else is in the batch. None: drawn from the engine's
    seed.
    max_tokens: most tokens to generate. stop: strings that end the text (they are cut off).
    stop_token_ids: tokens that end the text, beside the model's own end tokens. ignore_eos: do not stop on
    the latter.
    min_tokens: so many tokens come before any stop or end token (ignored or not), and a stop string that is
    complete within their text does not end it. Only the model's maximum length may end an answer earlier.
    logprobs: return the log probability (natural, before temperature and filters) of each chosen token and of
    this many most likely ones. None: none.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        if not (_is_number(self.temperature) and math.isfinite(self.temperature) and self.temperature >= 0):
            raise JaxkvError(f"temperature must be a finite number of at least 0, not {self.temperature!r}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise JaxkvError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        _check_int("top_k", self.top_k, 0)
        _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise JaxkvError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for text in self.stop:
            check_unicode("a stop string", text)
            if not text:
                raise JaxkvError("a stop string must have at least one character, not ''")
        for token in self.stop_token_ids:
            _check_int("a stop token id", token, 0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _as_tuple(name: str, values: object) -> tuple[Any, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise JaxkvError(f"{name} must be a list, not {values!r}")
    return tuple(values)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and low <= value
        and (high is None or value <= high)
    ):
        return
    limit = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise JaxkvError(f"{name} must be a whole number {limit}, not {value!r}")
