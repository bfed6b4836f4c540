"""Mamba 1 on a TPU: channels fill whole registers of 8 x 128, so a state of size N is N registers for each.

There is no matrix form (each channel decays at N rates of its own): prefill is a loop over a chunk's tokens
with the states of 1,024 channels in registers, b and c being scalars.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.layout import LANES, TILE_ROWS
from pallas_kernels.recurrent.inputs import SelectiveInputs
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.tpu.decode_loop import At, DecodeLoop, DecodeOperand
from pallas_kernels.recurrent.tpu.prefill_loop import Operand, PrefillLoop
from pallas_kernels.recurrent.tpu.schedule import cut, first_rows, tile, untile
from pallas_kernels.recurrent.tpu.slabs import pack_rows, unpack_rows
from pallas_kernels.recurrent.tpu.step import Step
from pallas_kernels.recurrent.tpu.support import is_packed

CHUNK = 32
"""Tokens; x, dt and y of 8,192 channels are 1 MiB each, in two buffers."""
UNROLLED = 8
"""Tokens of a turn. Those past a chunk's have a step of 0, which leaves a state as it is."""


def selective_scan_tpu(
    inputs: SelectiveInputs,
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    place: StatePlace,
    *,
    interpret: Any = False,
) -> StepResult:
    """Same contract as `selective_scan_reference`. `interpret` is `pallas_call`'s."""
    step = Step(pages, batch, table, place, interpret)
    out, pages = step.run(partial(_decode, inputs), partial(_prefill, inputs))
    real = (batch.seq_ids < batch.seq_lens.shape[0])[:, None]
    return StepResult(out + jnp.where(real, inputs.d * inputs.x.astype(jnp.float32), 0), pages)


def _rows_of_a(inputs: SelectiveInputs) -> jax.Array:
    """`a` with channels on rows and lanes, `[N, C / 128, 128]`."""
    return inputs.a.T.reshape(inputs.a.shape[1], -1, LANES)


def _decode(inputs: SelectiveInputs, step: Step) -> StepResult:
    """Outputs `[S, C]`."""
    rows = step.table.read.shape[0]
    channels, _ = step.place.shape
    lines = channels // LANES

    def channel_operand(value: jax.Array) -> DecodeOperand:
        return DecodeOperand(first_rows(value, rows).reshape(rows, lines, LANES))

    out = channel_operand(inputs.x)
    operands = [out, channel_operand(inputs.dt), DecodeOperand(_rows_of_a(inputs), shared=True)]
    b, c = (first_rows(value, rows).reshape(-1) for value in (inputs.b, inputs.c))
    loop = DecodeLoop(
        num_slabs=1,
        compute=partial(_decode_state, is_packed(step.place)),
        out=out,
        name="selective_scan_decode",
    )
    y, pages = loop.run(operands, step, in_smem=(b, c))
    return StepResult(y.reshape(rows, channels), pages)


def _decode_state(packed: bool, at: At, in_buffer, out_buffer, operand_refs, scratch, out_ref) -> None:
    """One token on one state, 1,024 channels at a time."""
    del scratch
    b_ref, c_ref, x_ref, dt_ref, a_ref = operand_refs
    size, lines, _ = a_ref.shape
    halves = 2 if packed else 1

    def some_channels(index, _):
        first = pl.multiple_of(index * TILE_ROWS, TILE_ROWS)
        here = pl.ds(first, TILE_ROWS)
        dt = dt_ref[at.seq, here]
        added = dt * x_ref[at.seq, here]
        total = jnp.zeros_like(dt)
        for pair in range(size // halves):
            words = pl.ds(pl.multiple_of(pair * lines + first, TILE_ROWS), TILE_ROWS)
            old, new = in_buffer[words], []
            for half in range(halves):
                n = pair * halves + half
                state = jnp.exp(dt * a_ref[n, here]) * unpack_rows(old, packed, half)
                new.append(state + added * b_ref[at.row * size + n])
                total += new[-1] * c_ref[at.row * size + n]
            out_buffer[words] = pack_rows(new, packed)
        out_ref[at.seq, here] = total

    lax.fori_loop(0, lines // TILE_ROWS, some_channels, None, unroll=4)


def _prefill(inputs: SelectiveInputs, step: Step) -> StepResult:
    """Outputs `[T, C]`."""
    chunks = cut(step.batch, step.table, CHUNK)
    count = chunks.seq.shape[0]
    channels, size = step.place.shape
    lines = channels // LANES

    def channel_operand(value: jax.Array) -> Operand:
        array = tile(value, chunks, CHUNK).reshape(count, CHUNK, lines, LANES)
        return Operand(array, (1, CHUNK, lines, LANES), lambda chunk, _: (chunk, 0, 0, 0))

    def scalar_operand(value: jax.Array) -> Operand:
        array = tile(value, chunks, CHUNK).reshape(count, 1, CHUNK * size)
        return Operand(array, (1, 1, CHUNK * size), lambda chunk, _: (chunk, 0, 0), in_smem=True)

    out = channel_operand(inputs.x)
    operands = [
        out,
        channel_operand(inputs.dt),
        Operand(_rows_of_a(inputs), (size, lines, LANES), lambda *_: (0, 0, 0)),
        scalar_operand(inputs.b),
        scalar_operand(inputs.c),
    ]
    loop = PrefillLoop(
        num_slabs=1,
        state_shape=(size, lines, LANES),
        unpack=partial(_unpack, is_packed(step.place)),
        pack=partial(_pack, is_packed(step.place)),
        compute=_chunk,
        out=out,
        name="selective_scan_prefill",
    )
    y, pages = loop.run(operands, chunks, step)
    return StepResult(untile(y.reshape(count, CHUNK, channels), chunks, step.batch), pages)


def _unpack(packed: bool, words, state_ref) -> None:
    lines, halves = state_ref.shape[1], 2 if packed else 1
    for n in range(state_ref.shape[0]):
        rows = slice(n // halves * lines, (n // halves + 1) * lines)
        state_ref[n] = unpack_rows(words[rows], packed, n % halves)


def _pack(packed: bool, state_ref, words) -> None:
    lines, halves = state_ref.shape[1], 2 if packed else 1
    for first in range(0, state_ref.shape[0], halves):
        rows = slice(first // halves * lines, (first // halves + 1) * lines)
        words[rows] = pack_rows([state_ref[first + half] for half in range(halves)], packed)


def _chunk(state_ref, num_tokens, operand_refs, out_ref) -> None:
    """A chunk's tokens on one state, 1,024 channels at a time."""
    x_ref, dt_ref, a_ref, b_ref, c_ref = operand_refs
    size, lines, _ = a_ref.shape

    def some_channels(index, _):
        here = pl.ds(pl.multiple_of(index * TILE_ROWS, TILE_ROWS), TILE_ROWS)

        def token(t, states):
            dt = dt_ref[0, t, here]
            added = dt * x_ref[0, t, here]
            new = [
                jnp.exp(dt * a_ref[n, here]) * states[n] + added * b_ref[0, 0, t * size + n]
                for n in range(size)
            ]
            out_ref[0, t, here] = sum(
                (state * c_ref[0, 0, t * size + n] for n, state in enumerate(new)), jnp.zeros_like(dt)
            )
            return tuple(new)

        def some_tokens(turn, states):
            for index in range(UNROLLED):
                states = token(turn * UNROLLED + index, states)
            return states

        states = tuple(state_ref[n, here] for n in range(size))
        states = lax.fori_loop(0, pl.cdiv(num_tokens, UNROLLED), some_tokens, states)
        for n, state in enumerate(states):
            state_ref[n, here] = state

    lax.fori_loop(0, lines // TILE_ROWS, some_channels, None)
