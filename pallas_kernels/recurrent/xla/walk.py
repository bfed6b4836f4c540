"""A recurrence over a ragged step: decodes token by token, prefill sequences in spans of tokens.

A span belongs to one sequence and ends where a state is to be kept, so no state inside a span is ever
needed. All loop bounds are dynamic: lengths never compile again.
"""

from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.xla.form import Form, TiledForm
from pallas_kernels.recurrent.xla.tiles import TileShape, TokenUpdate, decode_tiles, tile_shape
from pallas_kernels.recurrent.xla.words import close_pool, open_pool, read_state, write_state

BATCH_BYTES = 4 << 20
"""States of all sequences together, up to which decodes are computed at once rather than one by one: larger
ones leave the cache between reading and writing."""


class _Outputs(NamedTuple):
    """Outputs `[T, ...]`, 0 for tokens that have not been computed, and the pool, so far."""

    out: jax.Array
    pool: jax.Array


def walk(
    form: Form, inputs: Any, pages: jax.Array, batch: RaggedBatch, table: StateTable, place: StatePlace
) -> StepResult:
    """`form` over the tokens of `inputs` (a pytree of `[T, ...]`). The contract is that of `scan_tokens`.

    Nothing of the inputs' size is made but the outputs: on a CPU the first touch of new memory costs more
    than several passes over it.
    """
    tokens, rows = batch.positions.shape[0], table.read.shape[0]
    so_far = _Outputs(jnp.zeros((tokens, *form.out_shape), jnp.float32), open_pool(pages, place))
    most = min(rows, tokens)
    first = jax.tree.map(lambda x: x[:most].astype(jnp.float32), inputs)
    tile = tile_shape(place)
    if isinstance(form, TiledForm) and tile is not None and (update := form.update(first)) is not None:
        so_far = _decode_in_tiles(form, first, update, tile, so_far, batch, table, place)
    elif rows * 4 * prod(place.shape) <= BATCH_BYTES:
        so_far = _decode_together(form, first, so_far, batch, table, place)
    else:
        so_far = _decode_one_by_one(form, inputs, so_far, batch, table, place)
    if not batch.decode_only:
        so_far = _prefill(form, inputs, so_far, batch, table, place)
    return StepResult(so_far.out, close_pool(so_far.pool, place))


def _decode_in_tiles(
    form: TiledForm,
    first: Any,
    update: TokenUpdate,
    tile: TileShape,
    so_far: _Outputs,
    batch: RaggedBatch,
    table: StateTable,
    place: StatePlace,
) -> _Outputs:
    pages = close_pool(so_far.pool, place)
    summed, pages = decode_tiles(update, tile, pages, batch.seq_lens, batch.num_decodes, table, place)
    return _Outputs(_with_decodes(so_far.out, form.finish(summed, first), batch), open_pool(pages, place))


def _with_decodes(out: jax.Array, new: jax.Array, batch: RaggedBatch) -> jax.Array:
    """`out [T, ...]` with those of `new [S, ...]` that are decodes'."""
    decodes = (jnp.arange(new.shape[0]) < batch.num_decodes).reshape(-1, *(1 for _ in new.shape[1:]))
    return lax.dynamic_update_slice_in_dim(out, jnp.where(decodes, new, 0), 0, 0)


def _decode_together(
    form: Form, first: Any, so_far: _Outputs, batch: RaggedBatch, table: StateTable, place: StatePlace
) -> _Outputs:
    most = jax.tree.leaves(first)[0].shape[0]
    states = jax.vmap(lambda blocks: read_state(so_far.pool, blocks, place))(table.read[:most])
    states, out = jax.vmap(form.step)(states, first)

    def store(seq: jax.Array, pool: jax.Array) -> jax.Array:
        stored = lax.dynamic_index_in_dim(states, seq, keepdims=False)
        return _store(pool, stored, seq, batch.seq_lens[seq], table, place, last=True)

    pool = lax.fori_loop(0, batch.num_decodes, store, so_far.pool)
    return _Outputs(_with_decodes(so_far.out, out, batch), pool)


def _decode_one_by_one(
    form: Form, inputs: Any, so_far: _Outputs, batch: RaggedBatch, table: StateTable, place: StatePlace
) -> _Outputs:
    def decode(seq: jax.Array, so_far: _Outputs) -> _Outputs:
        token = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, seq, keepdims=False).astype(jnp.float32), inputs
        )
        stored, out = form.step(read_state(so_far.pool, table.read[seq], place), token)
        pool = _store(so_far.pool, stored, seq, batch.seq_lens[seq], table, place, last=True)
        return _Outputs(lax.dynamic_update_slice_in_dim(so_far.out, out[None], seq, 0), pool)

    return lax.fori_loop(0, batch.num_decodes, decode, so_far)


def _prefill(
    form: Form, inputs: Any, so_far: _Outputs, batch: RaggedBatch, table: StateTable, place: StatePlace
) -> _Outputs:
    def sequence(seq: jax.Array, so_far: _Outputs) -> _Outputs:
        begin, end = batch.query_starts[seq], batch.query_starts[seq + 1]
        to_len = batch.seq_lens[seq] - end  # tokens of the sequence up to index i (exclusive): i + this

        def one_span(
            carry: tuple[jax.Array, jax.Array, _Outputs],
        ) -> tuple[jax.Array, jax.Array, _Outputs]:
            first, state, so_far = carry
            stops = table.checkpoint_lens[seq] - to_len
            stop = jnp.where(stops > first, stops, end).min(initial=end)
            stop = stop if form.length is None else jnp.minimum(stop, first + form.length)
            state, out = form.span(state, inputs, so_far.out, first, stop)
            pool = so_far.pool
            if table.checkpoint.shape[1]:
                stored = form.close_state(state)
                pool = _store(pool, stored, seq, stop + to_len, table, place, last=False)
            return stop, state, _Outputs(out, pool)

        state = form.open_state(read_state(so_far.pool, table.read[seq], place))
        _, state, so_far = lax.while_loop(lambda carry: carry[0] < end, one_span, (begin, state, so_far))
        pool = write_state(so_far.pool, form.close_state(state), table.write[seq], jnp.bool_(True), place)
        return _Outputs(so_far.out, pool)

    return lax.fori_loop(batch.num_decodes, batch.num_seqs, sequence, so_far)


def _store(
    pool: jax.Array,
    stored: jax.Array,
    seq: jax.Array,
    seq_len: jax.Array,
    table: StateTable,
    place: StatePlace,
    *,
    last: bool,
) -> jax.Array:
    """The state after `seq_len` tokens, where it is wanted: as a checkpoint; with `last`, as the last one."""

    def keep(index: jax.Array, pool: jax.Array) -> jax.Array:
        reached = table.checkpoint_lens[seq, index] == seq_len
        return write_state(pool, stored, table.checkpoint[seq, index], reached, place)

    if table.checkpoint.shape[1]:
        pool = lax.fori_loop(0, table.checkpoint.shape[1], keep, pool)
    return write_state(pool, stored, table.write[seq], jnp.bool_(True), place) if last else pool
