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
from pallas_kernels.recurrent.cpu.tiles import AHEAD
from pallas_kernels.recurrent.cpu.units import LANES, Units
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable

POOL, SLOT, STARTS, LENS, SEQUENCES, READ, WRITE, KEPT_LENS, KEPT = range(9)
"""Operands of every kernel; the operation's own come after them."""
INPUTS = 9
NEW_POOL, OUT = 0, 1
PIECE_BYTES = 1 << 18
"""Bytes of states, times tokens, of a piece: units of a sequence next to each other, which are read ahead."""
PIECES = 32
"""Pieces at least, if there are as many units, so that many cores have work."""


def make_kernel(name: str, units: Units, span: Any, span_bytes: int, out_bytes: int) -> Kernel:
    """A kernel of `span(call, unit, table, room, first, stop, position)`, compiled by numba.

    It computes tokens [first, stop) of one sequence on the rows in `table`, the first of them at `position`;
    `room` is for `span_bytes`. out_bytes: of an output's element.
    """
    functions = state_functions(units)
    open_state, keep, room_bytes = functions
    count, columns, rows = units.count, units.columns, units.rows
    unit_bytes = rows * units.width * WORD
    table_bytes = rows * ADDRESS  # one after another, so that what lies behind a table is soon needed, too
    span_bytes = -(-span_bytes // registers.BYTES) * registers.BYTES
    bytes_of_all = registers.BYTES + span_bytes + (rows + AHEAD) * ADDRESS

    @compiled
    def sequences(call):
        return np.int64(load_int32(frame.operand(call, SEQUENCES)))

    @compiled
    def jobs_of_a_piece(call):
        tokens = load_int32(frame.operand(call, STARTS) + sequences(call) * WORD)
        each = unit_bytes * max(1, tokens // max(1, sequences(call)))
        return max(1, min(PIECE_BYTES // each, count * sequences(call) // PIECES))

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
    def row_of(call, sequence, ids):
        """Block ids of a sequence in one of the tables."""
        return frame.operand(call, ids) + sequence * frame.operand_size(call, READ, 1) * WORD

    @compiled
    def open_unit(call, sequence, unit, table, room):
        read, write = row_of(call, sequence, READ), row_of(call, sequence, WRITE)
        if load_int32(write) != 0:
            slot = np.int64(load_int32(frame.operand(call, SLOT)))
            open_state(frame.result(call, NEW_POOL), slot, read, write, unit, table, room)

    @compiled
    def tokens_of(call, sequence, unit, table, room):
        starts, write = frame.operand(call, STARTS) + sequence * WORD, row_of(call, sequence, WRITE)
        first, end = np.int64(load_int32(starts)), np.int64(load_int32(starts + WORD))
        if load_int32(write) == 0:
            return
        to_length = load_int32(frame.operand(call, LENS) + sequence * WORD) - end
        while first < end:
            stop = next_stop(call, sequence, first, end, to_length)
            span(call, unit, table, room, first, stop, first + to_length)
            keep_checkpoints(call, sequence, unit, table, stop + to_length)
            first = stop
        slot = np.int64(load_int32(frame.operand(call, SLOT)))
        keep(frame.result(call, NEW_POOL), slot, write, unit, table)

    @compiled
    def work(call, piece):
        each, rows_and_rest = jobs_of_a_piece(call), sequences(call) + 1
        first, end = piece * each, min(count * rows_and_rest, (piece + 1) * each)
        memory = allocate(bytes_of_all + each * (table_bytes + room_bytes))
        span_room = (memory + registers.BYTES - 1) // registers.BYTES * registers.BYTES
        rooms = span_room + span_bytes
        tables = rooms + each * room_bytes
        for job in range(first, end):
            sequence, unit, index = job // count, job % count, job - first
            if sequence < rows_and_rest - 1:
                open_unit(call, sequence, unit, tables + index * table_bytes, rooms + index * room_bytes)
        for job in range(first, end):
            sequence, unit, index = job // count, job % count, job - first
            if sequence < rows_and_rest - 1:
                tokens_of(call, sequence, unit, tables + index * table_bytes, span_room)
            else:
                done = load_int32(frame.operand(call, STARTS) + sequence * WORD)
                clear(call, unit, np.int64(done))
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
