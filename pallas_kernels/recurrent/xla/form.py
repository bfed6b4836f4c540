"""What an operation must be able to do for `walk` to run it over a ragged step."""

from typing import Any, Protocol, runtime_checkable

import jax

from pallas_kernels.recurrent.xla.tiles import TokenUpdate


class Form(Protocol):
    """A recurrence over tokens. States are float32 `[blocks, size, lanes]` as stored, or carried as
    `open_state` makes them.

    length: tokens of a span at most, None: any number. out_shape: of one token.
    """

    @property
    def length(self) -> int | None: ...

    @property
    def out_shape(self) -> tuple[int, ...]: ...

    def step(self, stored: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
        """The state after one token, and the token's output."""
        ...

    def open_state(self, stored: jax.Array) -> jax.Array:
        """A stored state as spans carry it."""
        ...

    def span(
        self, state: jax.Array, inputs: Any, out: jax.Array, first: jax.Array, stop: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The carried state after tokens [first, stop) of a step, and `out [T, ...]` with theirs."""
        ...

    def close_state(self, state: jax.Array) -> jax.Array:
        """The inverse of `open_state`."""
        ...


@runtime_checkable
class TiledForm(Form, Protocol):
    """A form whose tokens change all elements of a state alike, so that its tiles need not be together."""

    def update(self, inputs: Any) -> TokenUpdate | None:
        """What tokens of S sequences, `inputs [S, ...]` float32, do to their states. None: blocks of a state
        mix heads with different keys.
        """
        ...

    def finish(self, summed: jax.Array, inputs: Any) -> jax.Array:
        """Outputs `[S, ...]` from an update's sums `[S, blocks, lanes]`."""
        ...
