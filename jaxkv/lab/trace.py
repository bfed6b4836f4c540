"""A trace in memory: requests in the order of their arrival, whatever file they came from."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from jaxkv.lab.content import Content


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    name: where it stands in the file. arrival: seconds from the start of the trace.
    num_prompt_tokens, num_output_tokens: lengths; an answer has at least one token.
    """

    name: str
    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    content: Content


@dataclass(frozen=True)
class Trace:
    """Requests, earliest first.

    source: the file's name, or what made the trace. format: name of the loader.
    block_size: tokens that one id stands for, None where tokens are known, or lengths alone.
    num_skipped_lines: bad lines that were passed over as asked.
    has_content: off where the trace tells lengths only, so that a hit rate means nothing.
    notes: what a reader of hit rates must know of the trace.
    """

    source: str
    format: str
    requests: Sequence[TraceRequest]
    block_size: int | None = None
    num_skipped_lines: int = 0
    has_content: bool = True
    notes: tuple[str, ...] = ()

    def first(self, num_requests: int) -> "Trace":
        """The trace up to its request number `num_requests`."""
        return dataclasses.replace(self, requests=self.requests[:num_requests])

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)
