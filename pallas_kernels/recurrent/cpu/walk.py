"""A ragged step as pieces: every unit of every sequence by itself, its tokens in order."""

from dataclasses import astuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.cpu import frame, registers
from pallas_kernels.cpu.instruction import compiled
from pallas_kernels.cpu.kernel import Kernel
from pallas_kernels.cpu.memory import allocate, free, load_int32
from pallas_kernels.recurrent.cpu.states import ADDRESS, WORD, state_functions
from pallas_kernels.recurrent.cpu.units import LANES, Units
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable

POOL, SLOT, STARTS, LENS, SEQUENCES, READ, WRITE, KEPT_LENS, KEPT = range(9)
"""Operands of every kernel; the operation's own come after them."""
INPUTS = 9
NEW_POOL, OUT = 0, 1
PIECE_BYTES = 1 << 16
"""Bytes of states, times tokens, that a piece has at least: some microseconds."""


def make_kernel(name: str, units: Units, span: Any, span_bytes: int, out_bytes: int) -> Kernel:
    """A kernel of `span(call, unit, table, room, first, stop, position)`, compiled by numba.

    It computes tokens [first, stop) of one sequence on the rows in `table`, the first of them at `position`;
    `room` is for `span_bytes`. out_bytes: of an output's element.
    """
    functions = state_functions(units)
    open_state, keep, room_bytes = functions
    count, columns, rows = units.count, units.columns, units.rows
    unit_bytes = rows * units.width * WORD
    table_bytes = -(-rows * ADDRESS // registers.BYTES) * registers.BYTES
    bytes_of_all = table_bytes + room_bytes + span_bytes + registers.BYTES

    @compiled
    def sequences(call):
        return np.int64(load_int32(frame.operand(call, SEQUENCES)))

    @compiled
    def jobs_of_a_piece(call):
        tokens = load_int32(frame.operand(call, STARTS) + sequences(call) * WORD)
        each = unit_bytes * max(1, tokens // max(1, sequences(call)))
        return max(1, PIECE_BYTES // each)

    @compiled
    def pieces(call):
        jobs = count * (sequences(call) + 1)
        each = jobs_of_a_piece(call)
        return (jobs + each - 1) // each

    @compiled
    def clear(call, unit, first):
        tokens, row = frame.result_size(call, OUT, 0), count * columns * out_bytes
        for token in range(first, tokens):
            at = frame.result(call, OUT) + token * row + unit * columns * out_bytes
            for column in range(0, columns, LANES):
                if out_bytes == 4:
                    registers.store(at + column * 4, registers.splat(np.float32(0)))
                else:
                    registers.store_bfloat16(at + column * 2, registers.splat(np.float32(0)))

    @compiled
    def next_stop(call, sequence, first, end, to_length):
        kept = frame.operand_size(call, KEPT_LENS, 1)
        lens = frame.operand(call, KEPT_LENS) + sequence * kept * WORD
        stop = end
        for index in range(kept):
            wanted = load_int32(lens + index * WORD) - to_length
            if first < wanted < stop:
                stop = wanted
        return stop

    @compiled
    def keep_checkpoints(call, sequence, unit, table, length):
        kept, width = frame.operand_size(call, KEPT_LENS, 1), frame.operand_size(call, KEPT, 2)
        lens = frame.operand(call, KEPT_LENS) + sequence * kept * WORD
        blocks = frame.operand(call, KEPT) + sequence * kept * width * WORD
        slot = np.int64(load_int32(frame.operand(call, SLOT)))
        for index in range(kept):
            if load_int32(lens + index * WORD) == length:
                at = blocks + index * width * WORD
                keep(frame.result(call, NEW_POOL), slot, at, unit, table)

    @compiled
    def tokens_of(call, sequence, unit, table):
        starts = frame.operand(call, STARTS) + sequence * WORD
        first, end = np.int64(load_int32(starts)), np.int64(load_int32(starts + WORD))
        row = sequence * frame.operand_size(call, READ, 1) * WORD
        read, write = frame.operand(call, READ) + row, frame.operand(call, WRITE) + row
        if load_int32(write) == 0:
            return
        pool, slot = frame.result(call, NEW_POOL), np.int64(load_int32(frame.operand(call, SLOT)))
        to_length = load_int32(frame.operand(call, LENS) + sequence * WORD) - end
        room = table + table_bytes
        open_state(pool, slot, read, write, unit, table, room)
        while first < end:
            stop = next_stop(call, sequence, first, end, to_length)
            span(call, unit, table, room + room_bytes, first, stop, first + to_length)
            keep_checkpoints(call, sequence, unit, table, stop + to_length)
            first = stop
        keep(pool, slot, write, unit, table)

    @compiled
    def work(call, piece):
        each, rows_and_rest = jobs_of_a_piece(call), sequences(call) + 1
        memory = allocate(bytes_of_all)
        table = (memory + registers.BYTES - 1) // registers.BYTES * registers.BYTES
        for job in range(piece * each, min(count * rows_and_rest, (piece + 1) * each)):
            unit, sequence = job // rows_and_rest, job % rows_and_rest
            if sequence < rows_and_rest - 1:
                tokens_of(call, sequence, unit, table)
            else:
                end = load_int32(frame.operand(call, STARTS) + sequence * WORD)
                clear(call, unit, np.int64(end))
        free(memory)

    sizes = "_".join(str(int(size)) for size in astuple(units))
    return Kernel(f"{name}_{sizes}", pieces, work)


def run_kernel(
    kernel: Kernel,
    out: jax.ShapeDtypeStruct,
    inputs: list[jax.Array],
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    place: StatePlace,
) -> StepResult:
    """What a kernel of `make_kernel` makes of a step."""
    slot = jnp.asarray(place.layer_slot, jnp.int32)
    step = [slot, batch.query_starts, batch.seq_lens, batch.num_seqs]
    tables = [table.read, table.write, table.checkpoint_lens, table.checkpoint]
    pool = jax.ShapeDtypeStruct(pages.shape, pages.dtype)
    pages, result = kernel([pool, out], pages, *step, *tables, *inputs, in_place={POOL: NEW_POOL})
    return StepResult(result, pages)
