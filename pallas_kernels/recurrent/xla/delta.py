"""The gated delta rule: a state `[blocks, dk, lanes]`, in chunks carried as `[Hk, dk, channels of a key]`.

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
from pallas_kernels.recurrent.inputs import DeltaInputs, KeyScaling
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.xla.decays import decays_between
from pallas_kernels.recurrent.xla.matrices import Matrices
from pallas_kernels.recurrent.xla.substitution import solve_unit_lower
from pallas_kernels.recurrent.xla.tiles import TokenUpdate
from pallas_kernels.recurrent.xla.walk import walk
from pallas_kernels.recurrent.xla.window import Chunk, through_window

CHUNK = 64  # measured on a CPU: products with the state are faster in larger chunks, all else grows with them
HIGHEST = lax.Precision.HIGHEST


class DeltaForm(NamedTuple):
    """`heads` value heads, `key_heads` key heads; `scaling` of the inputs' queries and keys."""

    heads: int
    key_heads: int
    matrices: Matrices
    scaling: KeyScaling
    length: int = CHUNK

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.heads, self.matrices.head_size)

    def step(self, stored: jax.Array, inputs: DeltaInputs) -> tuple[jax.Array, jax.Array]:
        state = self.matrices.open(stored, self.heads)
        q, k = self.scaling(inputs.q, inputs.k)
        q, k = (jnp.repeat(x, self.heads // self.key_heads, axis=0) for x in (q, k))
        decay = jnp.exp(inputs.g)[:, None]
        # Both sums are over the state as it was, so that it is read once.
        asked, seen = (decay * jnp.einsum("hk,hkv->hv", x, state, precision=HIGHEST) for x in (q, k))
        added = inputs.beta[:, None] * (inputs.v - seen)
        out = asked + (q * k).sum(axis=1, keepdims=True) * added
        state = decay[:, :, None] * state + k[:, :, None] * added[:, None, :]
        return self.matrices.close(state), out

    def update(self, inputs: DeltaInputs) -> TokenUpdate | None:
        sequences, (blocks, _, lanes) = inputs.g.shape[0], self.matrices.stored
        if blocks % self.key_heads:
            return None
        q, k = self.scaling(inputs.q, inputs.k)
        columns = (sequences, blocks, lanes)
        decays, beta = (
            jnp.repeat(x, self.matrices.head_size, axis=1).reshape(columns)
            for x in (jnp.exp(inputs.g), inputs.beta)
        )
        return TokenUpdate(k, q, inputs.v.reshape(columns), decays, beta=beta)

    def finish(self, summed: jax.Array, inputs: DeltaInputs) -> jax.Array:
        return summed.reshape(inputs.v.shape)

    def open_state(self, stored: jax.Array) -> jax.Array:
        return self.matrices.open_groups(stored, self.key_heads)

    def close_state(self, state: jax.Array) -> jax.Array:
        return self.matrices.close_groups(state)

    def span(
        self, state: jax.Array, inputs: DeltaInputs, out: jax.Array, first: jax.Array, stop: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return through_window(self.chunk, self.length, state, inputs, out, first, stop)

    def chunk(self, state: jax.Array, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        # A row that is no token: no decay (g = 0), nothing added (beta = 0).
        tokens = DeltaInputs(
            *(jnp.where(chunk.valid.reshape(-1, *(1 for _ in x.shape[1:])), x, 0) for x in chunk.inputs)
        )
        length = chunk.valid.shape[0]
        q, k = self.scaling(tokens.q, tokens.k)
        both = jnp.concatenate([k, q]).transpose(1, 0, 2)  # [Hk, 2 L, dk]
        pairs = jnp.einsum("gik,gjk->gij", both, both[:, :length], precision=HIGHEST)
        seen = jnp.matmul(both, state, precision=HIGHEST)  # [Hk, 2 L, channels]
        seen_keys, seen_queries = self._by_head(seen[:, :length]), self._by_head(seen[:, length:])

        beta = tokens.beta.T[..., None]
        from_start = jnp.exp(jnp.cumsum(tokens.g, axis=0)).T[..., None]  # [Hv, L, 1]
        decays = decays_between(tokens.g.T)
        lower = jnp.tril(beta * decays * self._repeat(pairs[:, :length]), -1)
        wanted = beta * (tokens.v.transpose(1, 0, 2) - from_start * seen_keys)
        added = solve_unit_lower(lower, wanted)
        between = jnp.matmul(decays * self._repeat(pairs[:, length:]), added, precision=HIGHEST)
        out = from_start * seen_queries + between

        weighted = self._by_key(decays[:, -1, :, None] * added)
        grown = jnp.einsum("gkl,glc->gkc", k.transpose(1, 2, 0), weighted, precision=HIGHEST)
        left = jnp.repeat(from_start[:, -1], self.matrices.head_size, axis=1)  # [Hv, dv]
        return left.reshape(self.key_heads, 1, -1) * state + grown, out.transpose(1, 0, 2)

    def _repeat(self, x: jax.Array) -> jax.Array:
        """`[Hk, ...]` to `[Hv, ...]`."""
        return jnp.repeat(x, self.heads // self.key_heads, axis=0)

    def _by_head(self, x: jax.Array) -> jax.Array:
        """`[Hk, L, channels]` to `[Hv, L, dv]`."""
        length, size = x.shape[1], self.matrices.head_size
        return x.reshape(self.key_heads, length, -1, size).transpose(0, 2, 1, 3).reshape(-1, length, size)

    def _by_key(self, x: jax.Array) -> jax.Array:
        """The inverse of `_by_head`."""
        length, size = x.shape[1:]
        return (
            x.reshape(self.key_heads, -1, length, size)
            .transpose(0, 2, 1, 3)
            .reshape(self.key_heads, length, -1)
        )


def gated_delta_rule_xla(
    inputs: DeltaInputs,
    scaling: KeyScaling,
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    place: StatePlace,
) -> StepResult:
    """Same contract as `gated_delta_rule_reference`, but queries and keys are still to be scaled."""
    _, heads, value_size = inputs.v.shape
    stored = place.layout.stored_shape(place.part)
    form = DeltaForm(heads, inputs.k.shape[1], Matrices(stored, value_size), scaling)
    return walk(form, inputs, pages, batch, table, place)
