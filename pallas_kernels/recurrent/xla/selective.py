"""Mamba 1: a state `[1, N, C]`. Each channel decays at N rates of its own, so there is no matrix form: a loop
over tokens, bound by the exponentials, with the state of a few channels in the nearest cache.

Loops without a matrix product become one function for XLA on a CPU, in which a turn costs next to nothing.
"""

from math import log
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.recurrent.inputs import SelectiveInputs
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.xla.exponentials import exp2_of_negative
from pallas_kernels.recurrent.xla.pick import pick
from pallas_kernels.recurrent.xla.tiles import TokenUpdate
from pallas_kernels.recurrent.xla.walk import walk

CHANNELS = 256
"""Channels that a loop over tokens carries, with their rates: 32 KiB for 16 states."""
TURN = 16
"""Tokens for which they are carried: their inputs of other channels are still in a cache when those come."""


class Tokens(NamedTuple):
    """x, dt `[..., C]`, b, c `[..., N]`."""

    x: jax.Array
    dt: jax.Array
    b: jax.Array
    c: jax.Array


class SelectiveForm(NamedTuple):
    """`rates [N, C]`, a over the logarithm of 2, and `d [C]`, float32."""

    rates: jax.Array
    d: jax.Array
    length: int | None = None

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.d.shape

    def step(self, stored: jax.Array, inputs: Tokens) -> tuple[jax.Array, jax.Array]:
        state, out = _token(self.rates, self.d, stored[0], inputs)
        return state[None], out

    def update(self, inputs: Tokens) -> TokenUpdate:
        added = inputs.dt * inputs.x
        keys, queries = inputs.b[:, None], inputs.c[:, None]
        return TokenUpdate(keys, queries, added[:, None], inputs.dt[:, None], rates=self.rates)

    def finish(self, summed: jax.Array, inputs: Tokens) -> jax.Array:
        return summed[:, 0] + self.d * inputs.x

    def open_state(self, stored: jax.Array) -> jax.Array:
        return stored[0]

    def close_state(self, state: jax.Array) -> jax.Array:
        return state[None]

    def span(
        self, state: jax.Array, inputs: Tokens, out: jax.Array, first: jax.Array, stop: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        channels = self.d.shape[0]
        width = CHANNELS if channels % CHANNELS == 0 else channels
        blocks = channels // width

        def split(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:-1], blocks, width)

        x, dt, rates, d = split(inputs.x), split(inputs.dt), split(self.rates), split(self.d)

        def some_tokens(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            begin = first + index * TURN
            end = jnp.minimum(begin + TURN, stop)

            def some_channels(
                block: jax.Array, carry: tuple[jax.Array, jax.Array]
            ) -> tuple[jax.Array, jax.Array]:
                state, out = carry
                here = lax.dynamic_index_in_dim(rates, block, 1, keepdims=False), pick(d, block)

                def one(token: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                    part, out = carry
                    values = Tokens(
                        pick(x, token, block),
                        pick(dt, token, block),
                        pick(inputs.b, token),
                        pick(inputs.c, token),
                    )
                    part, y = _token(*here, part, values)
                    return part, lax.dynamic_update_slice(out, y[None, None], (token, block, 0))

                part = lax.dynamic_index_in_dim(state, block, 1, keepdims=False)
                part, out = lax.fori_loop(begin, end, one, (part, out))
                return lax.dynamic_update_index_in_dim(state, part, block, 1), out

            return lax.fori_loop(0, blocks, some_channels, carry)

        turns = (stop - first + TURN - 1) // TURN
        state, out = lax.fori_loop(0, turns, some_tokens, (split(state), split(out)))
        return state.reshape(self.rates.shape), out.reshape(-1, channels)


def _token(rates: jax.Array, d: jax.Array, state: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
    """A token of some channels: `rates`, `state` `[N, C]`, `d` `[C]`."""
    x, dt, b, c = (value.astype(jnp.float32) for value in token)
    state = exp2_of_negative(dt * rates) * state + b[:, None] * (dt * x)
    # No product of matrices: that would be a call, and keep the loop over tokens from becoming one function.
    return state, sum((c[n] * state[n] for n in range(state.shape[0])), d * x)


def selective_scan_xla(
    inputs: SelectiveInputs, pages: jax.Array, batch: RaggedBatch, table: StateTable, place: StatePlace
) -> StepResult:
    """Same contract as `selective_scan_reference`."""
    form = SelectiveForm(inputs.a.T / log(2), inputs.d)
    return walk(form, Tokens(inputs.x, inputs.dt, inputs.b, inputs.c), pages, batch, table, place)
