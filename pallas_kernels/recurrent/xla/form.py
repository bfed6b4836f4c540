"""What an operation must be able to do for `walk` to run it over a ragged step."""

from typing import Any, NamedTuple, Protocol

import jax


class Chunk(NamedTuple):
    """Rows `first` up to `stop` (exclusive) are a chunk's tokens (`valid bool[L]`). Others hold anything."""

    inputs: Any
    first: jax.Array
    stop: jax.Array
    valid: jax.Array


class Form(Protocol):
    """A recurrence over tokens. States are float32 `[blocks, size, lanes]` as stored, or carried as
    `open_state` makes them.

    length: tokens of a chunk. out_shape: of one token.
    """

    @property
    def length(self) -> int: ...

    @property
    def out_shape(self) -> tuple[int, ...]: ...

    def step(self, stored: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
        """The state after one token, and the token's output."""
        ...

    def open_state(self, stored: jax.Array) -> jax.Array:
        """A stored state as chunks carry it."""
        ...

    def chunk(self, state: jax.Array, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        """The carried state after a chunk's tokens, and outputs `[L, ...]`, of any value in other rows."""
        ...

    def close_state(self, state: jax.Array) -> jax.Array:
        """The inverse of `open_state`."""
        ...
