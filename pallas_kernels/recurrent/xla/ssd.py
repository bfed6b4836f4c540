"""Mamba 2: a state `[blocks, N, lanes]`, in chunks carried as `[G, N, channels of a group]`.

Within a chunk all tokens are computed with matrix products (the dual form of Dao and Gu 2024): with s the
running sum of dt a, token i gets `exp(s_i) C_i h` from the chunk's first state h, and
`exp(s_i - s_j) (C_i . B_j) dt_j x_j` from every token j up to itself.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.recurrent.inputs import SsdInputs
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.xla.decays import decays_between
from pallas_kernels.recurrent.xla.matrices import Matrices
from pallas_kernels.recurrent.xla.tiles import TokenUpdate
from pallas_kernels.recurrent.xla.walk import walk
from pallas_kernels.recurrent.xla.window import Chunk, through_window

CHUNK = 64  # measured on a CPU: products with the state are faster in larger chunks, all else grows with them
HIGHEST = lax.Precision.HIGHEST


class Tokens(NamedTuple):
    """x `[..., H, P]`, dt `[..., H]`, b, c `[..., G, N]`."""

    x: jax.Array
    dt: jax.Array
    b: jax.Array
    c: jax.Array


class SsdForm(NamedTuple):
    """`a [H]`, `d [H]` or None, float32; sizes of the state."""

    a: jax.Array
    d: jax.Array | None
    groups: int
    matrices: Matrices
    length: int = CHUNK

    @property
    def head_size(self) -> int:
        return self.matrices.head_size

    @property
    def heads(self) -> int:
        return self.a.shape[0]

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.heads, self.head_size)

    def step(self, stored: jax.Array, inputs: Tokens) -> tuple[jax.Array, jax.Array]:
        state = self.matrices.open(stored, self.groups)
        b, c = (jnp.repeat(x, state.shape[0] // self.groups, axis=0) for x in (inputs.b, inputs.c))
        decay = jnp.repeat(jnp.exp(inputs.dt * self.a), self.head_size).reshape(state.shape[0], 1, -1)
        added = (inputs.dt[:, None] * inputs.x).reshape(state.shape[0], 1, -1)
        state = decay * state + b[:, :, None] * added
        out = jnp.einsum("mn,mnl->ml", c, state, precision=HIGHEST).reshape(self.out_shape)
        return self.matrices.close(state), self._with_skip(out, inputs.x)

    def update(self, inputs: Tokens) -> TokenUpdate | None:
        sequences, (blocks, _, lanes) = inputs.dt.shape[0], self.matrices.stored
        if blocks % self.groups:
            return None
        decays = jnp.repeat(jnp.exp(inputs.dt * self.a), self.head_size, axis=1)
        added = inputs.dt[:, :, None] * inputs.x
        columns = (sequences, blocks, lanes)
        return TokenUpdate(inputs.b, inputs.c, added.reshape(columns), decays.reshape(columns))

    def finish(self, summed: jax.Array, inputs: Tokens) -> jax.Array:
        return self._with_skip(summed.reshape(inputs.x.shape), inputs.x)

    def open_state(self, stored: jax.Array) -> jax.Array:
        return self.matrices.open_groups(stored, self.groups)

    def close_state(self, state: jax.Array) -> jax.Array:
        return self.matrices.close_groups(state)

    def span(
        self, state: jax.Array, inputs: Tokens, out: jax.Array, first: jax.Array, stop: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return through_window(self.chunk, self.length, state, inputs, out, first, stop)

    def chunk(self, state: jax.Array, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        # A row that is no token: no decay (dt = 0), nothing added.
        tokens = Tokens(
            *(jnp.where(chunk.valid.reshape(-1, *(1 for _ in x.shape[1:])), x, 0) for x in chunk.inputs)
        )
        length, in_group = chunk.valid.shape[0], self.heads // self.groups
        logs = (tokens.dt * self.a).T
        decays = decays_between(logs).reshape(self.groups, in_group, length, length)
        from_start = jnp.exp(jnp.cumsum(logs, axis=1)).reshape(self.groups, in_group, length)
        x = (tokens.dt[:, :, None] * tokens.x).reshape(length, self.groups, in_group, self.head_size)
        x = x.transpose(1, 2, 0, 3)  # [G, heads of a group, L, P]
        b, c = (value.transpose(1, 0, 2) for value in (tokens.b, tokens.c))  # [G, L, N]

        alike = jnp.einsum("gin,gjn->gij", c, b, precision=HIGHEST)
        out = jnp.matmul(decays * alike[:, None], x, precision=HIGHEST)
        out = out.transpose(2, 0, 1, 3)  # [L, G, heads of a group, P]
        from_state = jnp.matmul(c, state, precision=HIGHEST)
        from_state = from_state.reshape(self.groups, length, in_group, self.head_size).transpose(1, 0, 2, 3)
        out = out + from_start.transpose(2, 0, 1)[..., None] * from_state

        to_end = decays[..., -1, :, None] * x
        to_end = to_end.transpose(0, 2, 1, 3).reshape(self.groups, length, -1)
        decay = jnp.repeat(from_start[..., -1], self.head_size, axis=-1)[:, None, :]
        state = decay * state + jnp.einsum("gln,glc->gnc", b, to_end, precision=HIGHEST)
        return state, self._with_skip(out.reshape(length, *self.out_shape), tokens.x)

    def _with_skip(self, out: jax.Array, x: jax.Array) -> jax.Array:
        return out if self.d is None else out + self.d[:, None] * x


def ssd_xla(
    inputs: SsdInputs, pages: jax.Array, batch: RaggedBatch, table: StateTable, place: StatePlace
) -> StepResult:
    """Same contract as `ssd_reference`."""
    stored = place.layout.stored_shape(place.part)
    form = SsdForm(inputs.a, inputs.d, inputs.b.shape[1], Matrices(stored, inputs.x.shape[2]))
    return walk(form, Tokens(inputs.x, inputs.dt, inputs.b, inputs.c), pages, batch, table, place)
