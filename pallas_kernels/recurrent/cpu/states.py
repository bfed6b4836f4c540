"""States of units as rows that functions compiled by numba can change: where they lie, opened, kept.

In float32 the rows are those in the pool that the step writes; in bfloat16 they are a copy in float32.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.cpu import registers
from pallas_kernels.cpu.instruction import compiled
from pallas_kernels.cpu.memory import load_int32, load_int64, store_int64
from pallas_kernels.recurrent.cpu.units import LANES, Units

WORD = 4  # bytes
ADDRESS = 8


class StateFunctions(NamedTuple):
    """Of units, compiled by numba. `blocks`, `read`, `write` are addresses of block ids of a sequence.

    open(pool, slot, read, write, unit, table, room): fills `table`, int64 addresses of a state's rows,
    and the rows themselves with what `read` holds, zeros where it is 0. room: for `room_bytes`.
    keep(pool, slot, blocks, unit, table): writes the rows to blocks, but not to 0.
    """

    open: Any
    keep: Any
    room_bytes: int


@cache
def state_functions(units: Units) -> StateFunctions:
    """The functions for such units."""
    rows, width, packed, high_rows = units.rows, units.width, units.packed, units.high_rows
    word_rows, across = units.word_rows, units.across
    first_word, block_stride, row_stride = units.first_word, units.block_stride, units.row_stride
    page_words, layer_slots = units.page_words, units.layer_slots
    register_words, register = LANES, registers.BYTES

    @compiled
    def words_at(pool, slot, blocks, unit, row):
        """The address of a row of words."""
        word = first_word + unit // across * block_stride + unit % across * width + row * row_stride
        at = slot + word // page_words
        page = np.int64(load_int32(blocks + at // layer_slots * WORD)) * layer_slots + at % layer_slots
        return pool + (page * page_words + word % page_words) * WORD

    @compiled
    def low_row(row):
        return row if high_rows else 2 * row

    @compiled
    def high_row(row):
        return row + high_rows if high_rows else 2 * row + 1

    @compiled
    def clear(at):
        for column in range(0, width, register_words):
            registers.store(at + column * WORD, registers.splat(np.float32(0)))

    @compiled
    def copy(source, target):
        for column in range(0, width, register_words):
            registers.store(target + column * WORD, registers.load(source + column * WORD))

    @compiled
    def open_state(pool, slot, read, write, unit, table, room):
        fresh = load_int32(read) == 0
        if packed:
            for row in range(rows):
                store_int64(table + row * ADDRESS, room + row * width * WORD)
                if fresh:
                    clear(room + row * width * WORD)
            if not fresh:
                for row in range(word_rows):
                    source = words_at(pool, slot, read, unit, row)
                    low = load_int64(table + low_row(row) * ADDRESS)
                    high = load_int64(table + high_row(row) * ADDRESS)
                    for at in range(0, width * WORD, register):
                        registers.store(low + at, registers.load_low_halves(source + at))
                        registers.store(high + at, registers.load_high_halves(source + at))
        else:
            for row in range(rows):
                here = words_at(pool, slot, write, unit, row)
                store_int64(table + row * ADDRESS, here)
                if fresh:
                    clear(here)
                else:
                    source = words_at(pool, slot, read, unit, row)
                    if source != here:
                        copy(source, here)

    @compiled
    def keep(pool, slot, blocks, unit, table):
        if load_int32(blocks) == 0:
            return
        for row in range(word_rows):
            target = words_at(pool, slot, blocks, unit, row)
            if packed:
                low = load_int64(table + low_row(row) * ADDRESS)
                high = load_int64(table + high_row(row) * ADDRESS)
                for at in range(0, width * WORD, register):
                    registers.store_halves(target + at, registers.load(low + at), registers.load(high + at))
            else:
                source = load_int64(table + row * ADDRESS)
                if source != target:
                    copy(source, target)

    return StateFunctions(open_state, keep, rows * width * WORD if packed else 0)
