"""Made-up traces of common patterns, the same for the same seed everywhere."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jaxkv.errors import JaxkvError
from jaxkv.lab.content import Tokens
from jaxkv.lab.trace import Trace, TraceRequest

VOCABULARY = 32_000
MEAN_GAP = 2.0
"""Seconds between one conversation's start and the next one's."""


@dataclass(frozen=True)
class _Turn:
    delay: float
    prompt: NDArray[np.int32]
    answer: NDArray[np.int32]


@dataclass
class _Maker:
    rng: np.random.Generator
    shared: dict[int, NDArray[np.int32]] = field(default_factory=dict)

    def text(self, least: int, most: int) -> NDArray[np.int32]:
        return self.rng.integers(0, VOCABULARY, int(self.rng.integers(least, most + 1)), dtype=np.int32)

    def one_of(self, count: int, least: int, most: int) -> NDArray[np.int32]:
        """One of `count` texts that conversations share."""
        chosen = int(self.rng.integers(count))
        if chosen not in self.shared:
            self.shared[chosen] = self.text(least, most)
        return self.shared[chosen]


def _joined(*parts: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate(parts)


def _system(maker: _Maker) -> Iterator[_Turn]:
    """One question after one of two long system prompts."""
    yield _Turn(0.0, _joined(maker.one_of(2, 1500, 2500), maker.text(20, 200)), maker.text(50, 300))


def _talk(maker: _Maker, start: NDArray[np.int32], turns: int, said: int, pause: float) -> Iterator[_Turn]:
    """A conversation that sends everything before it again."""
    context = start
    for turn in range(turns):
        delay = 0.0 if turn == 0 else float(maker.rng.exponential(pause))
        context = _joined(context, maker.text(said // 10, said))
        answer = maker.text(20, 300)
        yield _Turn(delay, context, answer)
        context = _joined(context, answer)


def _chat(maker: _Maker) -> Iterator[_Turn]:
    """A short system prompt that all share, then two to eight turns with long pauses."""
    turns = int(maker.rng.integers(2, 9))
    yield from _talk(maker, maker.one_of(1, 300, 600), turns, 200, 30.0)


def _agent(maker: _Maker) -> Iterator[_Turn]:
    """Tools described at length, then many quick calls whose results are long."""
    turns = int(maker.rng.integers(5, 21))
    yield from _talk(maker, maker.one_of(3, 3000, 6000), turns, 1000, 3.0)


def _document(maker: _Maker) -> Iterator[_Turn]:
    """One of ten documents, then a question of its own."""
    yield _Turn(0.0, _joined(maker.one_of(10, 4000, 12000), maker.text(20, 100)), maker.text(50, 200))


def _resend(maker: _Maker) -> Iterator[_Turn]:
    """A prompt, and soon the same prompt again."""
    prompt = maker.text(200, 3000)
    for delay in (0.0, 5.0):
        yield _Turn(delay, prompt, maker.text(20, 200))


PATTERNS: dict[str, Callable[[_Maker], Iterator[_Turn]]] = {
    "system": _system,
    "chat": _chat,
    "agent": _agent,
    "document": _document,
    "resend": _resend,
}
"""The patterns by name; "mixed" takes them in turn."""


def generate(pattern: str, num_requests: int, seed: int) -> Trace:
    """A trace of `num_requests` requests. Raises JaxkvError for an unknown pattern, or no request."""
    if pattern != "mixed" and pattern not in PATTERNS:
        raise JaxkvError(f"unknown pattern {pattern!r}; known are {', '.join(PATTERNS)} and mixed")
    if num_requests < 1:
        raise JaxkvError(f"a trace must have at least 1 request, got {num_requests}")
    names = list(PATTERNS) if pattern == "mixed" else [pattern]
    seeds = np.random.SeedSequence(seed).spawn(len(names) + 1)
    makers = [_Maker(np.random.default_rng(s)) for s in seeds[1:]]
    gaps = np.random.default_rng(seeds[0])
    requests: list[TraceRequest] = []
    start, conversation = 0.0, 0
    while len(requests) < num_requests:
        which = conversation % len(names)
        time = start
        for number, turn in enumerate(PATTERNS[names[which]](makers[which])):
            time += turn.delay
            requests.append(
                TraceRequest(
                    name=f"{names[which]} {conversation}:{number}",
                    arrival=time,
                    num_prompt_tokens=len(turn.prompt),
                    num_output_tokens=len(turn.answer),
                    content=Tokens(turn.prompt, turn.answer),
                )
            )
        conversation += 1
        start += float(gaps.exponential(MEAN_GAP))
    requests = sorted(requests[:num_requests], key=lambda request: request.arrival)
    return Trace(f"generated: {pattern}, seed {seed}", "generated", requests)
