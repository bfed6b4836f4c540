"""The causal convolution: a state `[1, K - 1, C]`, the last inputs, oldest first."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.xla.walk import walk
from pallas_kernels.recurrent.xla.window import Chunk, through_window

CHUNK = 256


class ConvForm(NamedTuple):
    """`weight [K, C]` and `bias [C]` or None, float32."""

    weight: jax.Array
    bias: jax.Array | None
    silu: bool
    length: int = CHUNK

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.weight.shape[1],)

    def step(self, stored: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        window = jnp.concatenate([stored[0], inputs[None]], axis=0)
        return window[None, 1:], self._finish((window * self.weight).sum(axis=0))

    def open_state(self, stored: jax.Array) -> jax.Array:
        return stored[0]

    def span(
        self, state: jax.Array, inputs: jax.Array, out: jax.Array, first: jax.Array, stop: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return through_window(self.chunk, self.length, state, inputs, out, first, stop)

    def chunk(self, state: jax.Array, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        length, kernel = chunk.inputs.shape[0], self.weight.shape[0]
        window = jnp.concatenate([state, chunk.inputs], axis=0)
        window = lax.dynamic_update_slice_in_dim(window, state, chunk.first, 0)  # right before the tokens
        total = sum(window[tap : tap + length] * self.weight[tap] for tap in range(kernel))
        return lax.dynamic_slice_in_dim(window, chunk.stop, kernel - 1), self._finish(jnp.asarray(total))

    def close_state(self, state: jax.Array) -> jax.Array:
        return state[None]

    def _finish(self, total: jax.Array) -> jax.Array:
        total = total if self.bias is None else total + self.bias
        return jax.nn.silu(total) if self.silu else total


def causal_conv1d_xla(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    place: StatePlace,
    *,
    silu: bool,
) -> StepResult:
    """Same contract as `causal_conv1d_reference`."""
    bias = None if bias is None else bias.astype(jnp.float32)
    form = ConvForm(weight.astype(jnp.float32).T, bias, silu)
    return walk(form, x, pages, batch, table, place)
