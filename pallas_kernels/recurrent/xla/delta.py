"""The gated delta rule: a state `[blocks, dk, lanes]`, in chunks carried as `[Hv, dk, dv]`.

Within a chunk all tokens are computed with matrix products (Yang and others 2024, the WY form). With s the
running sum of g, the values that are really added, V', solve

    V'_i = beta_i (v_i - exp(s_i) S k_i - sum over j < i of exp(s_i - s_j) (k_i . k_j) V'_j)

a unit lower triangular system for each head; S is the chunk's first state.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.recurrent.inputs import DeltaInputs
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_layout import StoredShape
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.xla.form import Chunk
from pallas_kernels.recurrent.xla.walk import walk

CHUNK = 64
HIGHEST = lax.Precision.HIGHEST


class DeltaForm(NamedTuple):
    """Sizes: value heads `heads` of `value_size`, key heads `key_heads`; the stored state."""

    heads: int
    value_size: int
    key_heads: int
    stored: StoredShape
    length: int = CHUNK

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.heads, self.value_size)

    def step(self, stored: jax.Array, inputs: DeltaInputs) -> tuple[jax.Array, jax.Array]:
        blocks, size, lanes = self.stored
        together = lanes // self.value_size
        state = stored.reshape(blocks, size, together, self.value_size)
        q, k = (jnp.repeat(x, self.heads // self.key_heads, axis=0) for x in (inputs.q, inputs.k))
        alike = (q * k).sum(axis=1, keepdims=True)
        by_block = tuple(x.reshape(blocks, together, size).transpose(0, 2, 1)[..., None] for x in (q, k))
        decay = jnp.exp(inputs.g)[:, None]
        # Both sums are over the state as it was, so that it is read once.
        asked, seen = (decay * (state * x).sum(axis=1).reshape(self.out_shape) for x in by_block)
        added = inputs.beta[:, None] * (inputs.v - seen)
        out = asked + alike * added
        added = added.reshape(blocks, 1, together, self.value_size)
        state = decay.reshape(blocks, 1, together, 1) * state + by_block[1] * added
        return state.reshape(stored.shape), out

    def open_state(self, stored: jax.Array) -> jax.Array:
        blocks, size, lanes = self.stored
        heads = stored.reshape(blocks, size, lanes // self.value_size, self.value_size)
        return heads.transpose(0, 2, 1, 3).reshape(self.heads, size, self.value_size)

    def close_state(self, state: jax.Array) -> jax.Array:
        blocks, size, lanes = self.stored
        heads = state.reshape(blocks, lanes // self.value_size, size, self.value_size)
        return heads.transpose(0, 2, 1, 3).reshape(blocks, size, lanes)

    def chunk(self, state: jax.Array, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        # A row that is no token: no decay (g = 0), nothing added (beta = 0).
        tokens = DeltaInputs(
            *(jnp.where(chunk.valid.reshape(-1, *(1 for _ in x.shape[1:])), x, 0) for x in chunk.inputs)
        )
        length, copies = chunk.valid.shape[0], self.heads // self.key_heads
        q, k, v = (x.transpose(1, 0, 2) for x in (tokens.q, tokens.k, tokens.v))
        beta = tokens.beta.T[..., None]
        logs = jnp.cumsum(tokens.g, axis=0).T  # [Hv, L]
        from_start = jnp.exp(logs)[..., None]
        earlier = jnp.tril(jnp.ones((length, length), bool))
        decays = jnp.exp(jnp.where(earlier, logs[:, :, None] - logs[:, None, :], -jnp.inf))
        keys = jnp.repeat(jnp.einsum("hik,hjk->hij", k, k, precision=HIGHEST), copies, axis=0)
        queries = jnp.repeat(jnp.einsum("hik,hjk->hij", q, k, precision=HIGHEST), copies, axis=0)
        both = jnp.repeat(jnp.concatenate([k, q], axis=1), copies, axis=0)
        seen = jnp.matmul(both, state, precision=HIGHEST)  # [Hv, 2 L, dv]
        added = lax.linalg.triangular_solve(
            beta * decays * keys,
            beta * (v - from_start * seen[:, :length]),
            left_side=True,
            lower=True,
            unit_diagonal=True,
        )
        out = from_start * seen[:, length:] + jnp.matmul(decays * queries, added, precision=HIGHEST)
        last = logs[:, -1:]
        weighted = (jnp.exp(last - logs)[..., None] * added).reshape(self.key_heads, copies, length, -1)
        grown = jnp.einsum("hlk,hmlv->hmkv", k, weighted, precision=HIGHEST).reshape(state.shape)
        state = jnp.exp(last)[..., None] * state + grown
        return state, out.transpose(1, 0, 2)


def gated_delta_rule_xla(
    inputs: DeltaInputs, pages: jax.Array, batch: RaggedBatch, table: StateTable, place: StatePlace
) -> StepResult:
    """Same contract as `gated_delta_rule_reference`."""
    _, heads, value_size = inputs.v.shape
    stored = place.layout.stored_shape(place.part)
    form = DeltaForm(heads, value_size, inputs.k.shape[1], stored)
    return walk(form, inputs, pages, batch, table, place)
