"""The causal convolution on a TPU: kernels move the states, XLA does the arithmetic (a few shifted products).

Each sequence's last inputs are put before its new ones, so that every output is a window of one array:

    extended   s s s x x x x   s s s x   s s s x x ...      s: from the state, K - 1 rows a sequence
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.reference import reached_checkpoints
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.tpu.move import put, take
from pallas_kernels.recurrent.tpu.slabs import StatePages, state_pages


def causal_conv1d_tpu(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    place: StatePlace,
    *,
    silu: bool,
    interpret: Any = False,
) -> StepResult:
    """Same contract as `causal_conv1d_reference`. `interpret` is `pallas_call`'s."""
    tokens, channels = x.shape
    rows, kept = table.checkpoint_lens.shape
    layout, part = place.layout, place.part
    before = weight.shape[1] - 1
    real = jnp.arange(rows) < batch.num_seqs
    reads = state_pages(table.read, real, place)
    words = take(pages, reads, place, interpret=interpret)
    states = layout.stored_of_words(part, words)[:, 0]  # [S, K - 1, C]
    states = jnp.where(reads.live[:, None, None] == 1, states, 0)

    # Row r of sequence s starts at query_starts[s] + s (K - 1) of the extended array.
    x = x.astype(jnp.float32)
    open_rows = batch.query_starts[:-1] + jnp.arange(rows) * before
    source = jnp.zeros(tokens + rows * before, jnp.int32)
    seq = jnp.minimum(batch.seq_ids, rows - 1)
    at_token = jnp.arange(tokens) + (seq + 1) * before
    at_token = jnp.where(batch.seq_ids < rows, at_token, source.shape[0])
    source = source.at[at_token].set(jnp.arange(tokens, dtype=jnp.int32), mode="drop")
    at_state = open_rows[:, None] + jnp.arange(before)
    source = source.at[at_state.reshape(-1)].set(
        tokens + jnp.arange(rows * before, dtype=jnp.int32), mode="drop"
    )
    extended = jnp.concatenate([x, states.reshape(rows * before, channels)])[source]

    weight = weight.astype(jnp.float32)
    padded = jnp.pad(extended, ((before, 0), (0, 0)))
    total = sum(padded[tap : tap + extended.shape[0]] * weight[:, tap] for tap in range(before + 1))
    total = jnp.asarray(total) if bias is None else total + bias.astype(jnp.float32)
    out = jnp.where((batch.seq_ids < rows)[:, None], total[jnp.minimum(at_token, total.shape[0] - 1)], 0)

    def last_inputs(end: jax.Array) -> jax.Array:
        """Words of the states after the tokens before index `end` `[S, ...]` of each sequence."""
        offset = (end.reshape(rows, -1) - batch.query_starts[:-1, None] + open_rows[:, None]).reshape(-1)
        index = jnp.clip(offset[:, None] + jnp.arange(before), 0, extended.shape[0] - 1)
        return layout.words_of(part, extended[index][:, None])

    ends, wanted = batch.query_starts[1:], [state_pages(table.write, real, place)]
    finals = [last_inputs(ends)]
    if kept:
        reached = reached_checkpoints(batch, table) & real[:, None]
        finals.append(last_inputs(table.checkpoint_lens - (batch.seq_lens - ends)[:, None]))
        wanted.append(state_pages(table.checkpoint, reached, place))
    states_to_put = StatePages(*(jnp.concatenate(x) for x in zip(*wanted, strict=True)))
    pages = put(pages, jnp.concatenate(finals), states_to_put, place, interpret=interpret)
    return StepResult(jax.nn.silu(out) if silu else out, pages)
