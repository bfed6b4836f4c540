"""The gated delta rule: a state `[blocks, dk, lanes]`, carried as `[Hv, dk, dv]`.

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
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.triangle import unit_lower_inverse
from pallas_kernels.recurrent.xla.decays import decays_between
from pallas_kernels.recurrent.xla.form import Chunk
from pallas_kernels.recurrent.xla.matrices import Matrices
from pallas_kernels.recurrent.xla.walk import walk

CHUNK = 16  # measured on a CPU: products with the state are most of the work whatever the chunk
HIGHEST = lax.Precision.HIGHEST


class DeltaForm(NamedTuple):
    """`heads` value heads, `key_heads` key heads."""

    heads: int
    key_heads: int
    matrices: Matrices
    length: int = CHUNK

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.heads, self.matrices.head_size)

    def step(self, stored: jax.Array, inputs: DeltaInputs) -> tuple[jax.Array, jax.Array]:
        state = self.open_state(stored)
        q, k = (jnp.repeat(x, self.heads // self.key_heads, axis=0) for x in (inputs.q, inputs.k))
        decay = jnp.exp(inputs.g)[:, None]
        # Both sums are over the state as it was, so that it is read once.
        asked, seen = (decay * jnp.einsum("hk,hkv->hv", x, state, precision=HIGHEST) for x in (q, k))
        added = inputs.beta[:, None] * (inputs.v - seen)
        out = asked + (q * k).sum(axis=1, keepdims=True) * added
        state = decay[:, :, None] * state + k[:, :, None] * added[:, None, :]
        return self.close_state(state), out

    def open_state(self, stored: jax.Array) -> jax.Array:
        return self.matrices.open(stored, self.heads)

    def close_state(self, state: jax.Array) -> jax.Array:
        return self.matrices.close(state)

    def chunk(self, state: jax.Array, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        # A row that is no token: no decay (g = 0), nothing added (beta = 0).
        tokens = DeltaInputs(
            *(jnp.where(chunk.valid.reshape(-1, *(1 for _ in x.shape[1:])), x, 0) for x in chunk.inputs)
        )
        length, copies = chunk.valid.shape[0], self.heads // self.key_heads
        q, k, v = (x.transpose(1, 0, 2) for x in (tokens.q, tokens.k, tokens.v))
        beta = tokens.beta.T[..., None]
        from_start = jnp.exp(jnp.cumsum(tokens.g, axis=0)).T[..., None]  # [Hv, L, 1]
        decays = decays_between(tokens.g.T)
        keys = jnp.repeat(jnp.einsum("hik,hjk->hij", k, k, precision=HIGHEST), copies, axis=0)
        queries = jnp.repeat(jnp.einsum("hik,hjk->hij", q, k, precision=HIGHEST), copies, axis=0)
        both = jnp.repeat(jnp.concatenate([k, q], axis=1), copies, axis=0)
        seen = jnp.matmul(both, state, precision=HIGHEST)  # [Hv, 2 L, dv]
        [inverse] = unit_lower_inverse([jnp.tril(beta * decays * keys, -1)])
        wanted = beta * (v - from_start * seen[:, :length])
        added = jnp.matmul(inverse, wanted, precision=HIGHEST)
        out = from_start * seen[:, length:] + jnp.matmul(decays * queries, added, precision=HIGHEST)
        weighted = decays[:, -1, :, None] * added
        grown = jnp.einsum("hlk,hlv->hkv", both[:, :length], weighted, precision=HIGHEST)
        state = from_start[:, -1:] * state + grown
        return state, out.transpose(1, 0, 2)


def gated_delta_rule_xla(
    inputs: DeltaInputs, pages: jax.Array, batch: RaggedBatch, table: StateTable, place: StatePlace
) -> StepResult:
    """Same contract as `gated_delta_rule_reference`."""
    _, heads, value_size = inputs.v.shape
    stored = place.layout.stored_shape(place.part)
    form = DeltaForm(heads, inputs.k.shape[1], Matrices(stored, value_size))
    return walk(form, inputs, pages, batch, table, place)
