"""What a case asks of an engine's host code. One implementation drives jaxkv, one vLLM; neither adds work of
its own inside a timed call beyond the calls an engine has to make."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .layouts import Layout

Tokens = np.ndarray
"""int32[n]"""


@dataclass(frozen=True)
class Limits:
    """What a manager or scheduler is built for. `num_blocks` includes the null block."""

    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256


class DecodeBatch(Protocol):
    """Requests whose known tokens are computed. Each gets a first sampled token when the batch is made, and
    decodes one token a step."""

    def allocate(self) -> None:
        """The manager's part of one step; timed."""
        ...

    def settle(self) -> None:
        """Counts the step as computed and appends a sampled token to every request, with the hash of a block
        that it fills: not the manager's work, not timed (the scheduler cases time it)."""
        ...


class ManagerSide(Protocol):
    """A cache manager alone. Requests are opaque; their prompt's block hashes are computed in
    `new_request`."""

    def new_request(self, name: str, tokens: Tokens) -> Any: ...

    def look_up(self, request: Any) -> int:
        """Tokens of the cached prefix; timed."""
        ...

    def admit(self, request: Any, num_tokens: int) -> None:
        """Look-up, then allocation of the hit and of `num_tokens` more; timed."""
        ...

    def allocate(self, request: Any, num_tokens: int) -> None:
        """Slots for the next `num_tokens` tokens; timed."""
        ...

    def settle(self, request: Any, num_tokens: int) -> None:
        """Counts `num_tokens` more as computed; not timed."""
        ...

    def free(self, request: Any) -> None:
        """Timed."""
        ...

    def decode_batch(self, requests: list[Any]) -> DecodeBatch: ...


class PoolTooSmallError(RuntimeError):
    """A case needs more blocks than it has given the engine."""


class CalledAlike:
    """What both engines' managers are asked for by the same names. `_manager`: the engine's own."""

    _manager: Any

    def allocate(self, request: Any, num_tokens: int) -> None:
        if self._manager.allocate_slots(request, num_tokens) is None:
            raise PoolTooSmallError(f"no room for {num_tokens} more tokens of {request.request_id}")

    def settle(self, request: Any, num_tokens: int) -> None:
        request.num_computed_tokens += num_tokens
        self._manager.new_step_starts()

    def free(self, request: Any) -> None:
        self._manager.free(request)


class SchedulerSide(Protocol):
    """A scheduler with its cache manager."""

    def add(self, name: str, tokens: Tokens, max_tokens: int) -> None:
        """Makes the request, hashes its prompt and queues it; timed."""
        ...

    def schedule(self) -> int:
        """Plans one step; returns its number of tokens; timed."""
        ...

    def sample(self) -> None:
        """Stands for the model: makes the sampled tokens in the form the side expects; not timed."""
        ...

    def update(self) -> None:
        """Takes the sampled tokens in; timed."""
        ...

    @property
    def num_unfinished(self) -> int: ...


class Hashing(Protocol):
    def hash_all(self) -> None:
        """Hashes every full block of a prompt whose tokens are ready in memory; timed."""
        ...


class Side(Protocol):
    name: str

    def manager(self, layout: Layout, limits: Limits) -> ManagerSide: ...

    def scheduler(self, layout: Layout, limits: Limits) -> SchedulerSide: ...

    def hashing(self, tokens: Tokens, block_size: int) -> Hashing: ...
