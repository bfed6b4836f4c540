"""Mamba 1: a state `[1, N, C]`. Each channel decays at N rates of its own, so there is no matrix form: a loop
over tokens, a few to a turn, with the state in the cache. It is bound by the exponentials.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.recurrent.inputs import SelectiveInputs
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.xla.form import Chunk
from pallas_kernels.recurrent.xla.walk import walk

CHUNK = 64
UNROLL = 16


class Tokens(NamedTuple):
    """x, dt `[..., C]`, b, c `[..., N]`."""

    x: jax.Array
    dt: jax.Array
    b: jax.Array
    c: jax.Array


class SelectiveForm(NamedTuple):
    """`a [N, C]` and `d [C]`, float32."""

    a: jax.Array
    d: jax.Array
    length: int = CHUNK

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.d.shape

    def step(self, stored: jax.Array, inputs: Tokens) -> tuple[jax.Array, jax.Array]:
        state, out = self._token(stored[0], inputs)
        return state[None], out

    def open_state(self, stored: jax.Array) -> jax.Array:
        return stored[0]

    def chunk(self, state: jax.Array, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        # A row that is no token: no decay (dt = 0), nothing added.
        tokens = Tokens(*(jnp.where(chunk.valid[:, None], x, 0) for x in chunk.inputs))
        length = chunk.valid.shape[0]
        turn = UNROLL if length % UNROLL == 0 else 1

        def some(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            state, out = carry
            first = index * turn
            for token in range(turn):
                one = Tokens(*(lax.dynamic_index_in_dim(x, first + token, keepdims=False) for x in tokens))
                state, y = self._token(state, one)
                out = lax.dynamic_update_slice_in_dim(out, y[None], first + token, 0)
            return state, out

        out = jnp.zeros((length, *self.out_shape), jnp.float32)
        return lax.fori_loop(chunk.first // turn, (chunk.stop + turn - 1) // turn, some, (state, out))

    def close_state(self, state: jax.Array) -> jax.Array:
        return state[None]

    def _token(self, state: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
        state = jnp.exp(token.dt * self.a) * state + (token.dt * token.x) * token.b[:, None]
        return state, jnp.matmul(token.c, state, precision=lax.Precision.HIGHEST) + self.d * token.x


def selective_scan_xla(
    inputs: SelectiveInputs, pages: jax.Array, batch: RaggedBatch, table: StateTable, place: StatePlace
) -> StepResult:
    """Same contract as `selective_scan_reference`."""
    form = SelectiveForm(inputs.a.T, inputs.d)
    return walk(form, Tokens(inputs.x, inputs.dt, inputs.b, inputs.c), pages, batch, table, place)
