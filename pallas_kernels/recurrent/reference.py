"""The plain forms: one token after another through one scan. What the other implementations must equal.

Each operation is a function of one token, `(state, inputs) -> (state, output)`, in float32; `scan_tokens`
does the rest: states of all sequences, ragged rows, checkpoints.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.recurrent.inputs import DeltaInputs, SelectiveInputs, SsdInputs
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.store import read_states, write_states

TokenStep = Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]
"""A state in its part's shape and one token's inputs -> the new state and the token's output."""

HIGHEST = lax.Precision.HIGHEST


def scan_tokens(
    step: TokenStep,
    inputs: Any,
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    place: StatePlace,
) -> StepResult:
    """`step` over the tokens of `inputs` (a pytree of `[T, ...]`) in order, each on its sequence's state."""
    rows = table.read.shape[0]
    layout, part = place.layout, place.part
    states = layout.value_of(part, read_states(pages, table.read, place))
    kept = jnp.zeros((rows, table.checkpoint.shape[1], *place.shape), jnp.float32)

    def one_token(carry: tuple[jax.Array, jax.Array], token: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
        states, kept = carry
        seq_id, position, values = token
        row = jnp.minimum(seq_id, rows - 1)
        state, out = step(states[row], jax.tree.map(lambda x: x.astype(jnp.float32), values))
        here = jnp.where(seq_id < rows, row, rows)
        states = states.at[here].set(state, mode="drop")
        reached = table.checkpoint_lens[row] == position + 1
        now = reached.reshape(-1, *(1 for _ in state.shape))
        kept = kept.at[here].set(jnp.where(now, state, kept[row]), mode="drop")
        return (states, kept), jnp.where(seq_id < rows, out, 0)

    tokens = batch.seq_ids, batch.positions, inputs
    (states, kept), out = lax.scan(one_token, (states, kept), tokens)
    live = jnp.arange(rows) < batch.num_seqs
    pages = write_states(
        pages, layout.stored_of(part, states), jnp.where(live[:, None], table.write, 0), place
    )
    reached = reached_checkpoints(batch, table)
    pages = write_states(
        pages, layout.stored_of(part, kept), jnp.where(reached[..., None], table.checkpoint, 0), place
    )
    return StepResult(out, pages)


def reached_checkpoints(batch: RaggedBatch, table: StateTable) -> jax.Array:
    """Which checkpoints `bool[S, K]` lie within the step's tokens."""
    before = batch.seq_lens - (batch.query_starts[1:] - batch.query_starts[:-1])
    lens = table.checkpoint_lens
    return (lens > before[:, None]) & (lens <= batch.seq_lens[:, None])


def conv_step(weight: jax.Array, bias: jax.Array | None, silu: bool) -> TokenStep:
    """A causal convolution; state `[C, K - 1]`, the last inputs, oldest first."""
    weight = weight.astype(jnp.float32)

    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        window = jnp.concatenate([state, x[:, None]], axis=1)
        out = (window * weight).sum(axis=1)
        if bias is not None:
            out = out + bias.astype(jnp.float32)
        return window[:, 1:], jax.nn.silu(out) if silu else out

    return step


def selective_step(a: jax.Array, d: jax.Array) -> TokenStep:
    """Mamba 1 (Gu and Dao 2023); state `[C, N]`."""

    def step(state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, dt, b, c = inputs
        state = jnp.exp(dt[:, None] * a) * state + (dt * x)[:, None] * b
        return state, jnp.matmul(state, c, precision=HIGHEST) + d * x

    return step


def ssd_step(a: jax.Array, d: jax.Array | None) -> TokenStep:
    """Mamba 2 (Dao and Gu 2024); state `[H, P, N]`."""

    def step(state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, dt, b, c = inputs
        b, c = (jnp.repeat(value, x.shape[0] // value.shape[0], axis=0) for value in (b, c))
        state = jnp.exp(dt * a)[:, None, None] * state + (dt[:, None] * x)[:, :, None] * b[:, None, :]
        out = jnp.einsum("hpn,hn->hp", state, c, precision=HIGHEST)
        return state, out if d is None else out + d[:, None] * x

    return step


def delta_step(state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule (Yang and others 2024); state `[Hv, dv, dk]`."""
    q, k, v, g, beta = inputs
    q, k = (jnp.repeat(value, v.shape[0] // value.shape[0], axis=0) for value in (q, k))
    state = jnp.exp(g)[:, None, None] * state
    seen = jnp.einsum("hvk,hk->hv", state, k, precision=HIGHEST)
    state = state + (beta[:, None] * (v - seen))[:, :, None] * k[:, None, :]
    return state, jnp.einsum("hvk,hk->hv", state, q, precision=HIGHEST)


def causal_conv1d_reference(
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
    """A convolution of `x [T, C]` token by token."""
    return scan_tokens(conv_step(weight, bias, silu), x, pages, batch, table, place)


def selective_scan_reference(
    inputs: SelectiveInputs, pages: jax.Array, batch: RaggedBatch, table: StateTable, place: StatePlace
) -> StepResult:
    """Mamba 1 token by token."""
    x, dt, a, b, c, d = inputs
    return scan_tokens(selective_step(a, d), (x, dt, b, c), pages, batch, table, place)


def ssd_reference(
    inputs: SsdInputs, pages: jax.Array, batch: RaggedBatch, table: StateTable, place: StatePlace
) -> StepResult:
    """Mamba 2 token by token."""
    x, dt, a, b, c, d = inputs
    return scan_tokens(ssd_step(a, d), (x, dt, b, c), pages, batch, table, place)


def gated_delta_rule_reference(
    inputs: DeltaInputs, pages: jax.Array, batch: RaggedBatch, table: StateTable, place: StatePlace
) -> StepResult:
    """The gated delta rule token by token."""
    return scan_tokens(delta_step, inputs, pages, batch, table, place)
