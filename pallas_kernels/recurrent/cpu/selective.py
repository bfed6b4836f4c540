"""Mamba 1: states of 16 channels at a time stay in the nearest cache for some tokens, if there are some."""

from functools import cache
from math import log

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.cpu import frame
from pallas_kernels.cpu import registers as r
from pallas_kernels.cpu.instruction import compiled
from pallas_kernels.cpu.kernel import Kernel
from pallas_kernels.cpu.memory import load_int64
from pallas_kernels.recurrent.cpu.dtypes import readable
from pallas_kernels.recurrent.cpu.exponentials import exp2_of_negative
from pallas_kernels.recurrent.cpu.states import ADDRESS, WORD
from pallas_kernels.recurrent.cpu.units import LANES, Units, cut
from pallas_kernels.recurrent.cpu.walk import INPUTS, OUT, make_kernel, run_kernel
from pallas_kernels.recurrent.inputs import SelectiveInputs
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable

X, DT, RATES, B, C, D = range(INPUTS, INPUTS + 6)
TURN = 16
"""Tokens before the next channels' turn: their inputs of other channels are in a cache when those come."""
AHEAD = 8
"""Registers of channels by which states are asked for before they are needed."""


def selective_scan_numba(
    inputs: SelectiveInputs, pages: jax.Array, batch: RaggedBatch, table: StateTable, place: StatePlace
) -> StepResult:
    """Same contract as `selective_scan_reference`, but outputs have bfloat16 where x has."""
    units = cut(place, matrices=False)
    assert isinstance(units, Units)  # the implementation was not refused
    x, dt, a, b, c, d = readable(inputs.x), *inputs[1:]
    columns = a.reshape(-1, LANES, a.shape[1]).swapaxes(1, 2)  # as they are needed one after another
    values = [dt, columns / log(2), b, c, d]
    values = [x, *(value.astype(jnp.float32) for value in values)]
    kernel = _kernel(units, np.dtype(x.dtype))
    return run_kernel(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), values, pages, batch, table, place)


@cache
def _kernel(units: Units, dtype: np.dtype) -> Kernel:
    rows, width, channels = units.rows, units.width, units.count * units.width
    element = dtype.itemsize
    load = r.load_bfloat16 if element == 2 else r.load
    store = r.store_bfloat16 if element == 2 else r.store

    @compiled
    def advance(at, rates, row, token, step, added, total, b, c):
        """The output's sum after a row of the state, at an address, took in a token."""
        decay = exp2_of_negative(r.multiply(step, r.load(rates + row * r.BYTES)))
        key = r.multiply(r.load_splat(b + (token * rows + row) * WORD), added)
        state = r.multiply_add(decay, r.load(at), key)
        r.store(at, state)
        return r.multiply_add(r.load_splat(c + (token * rows + row) * WORD), state, total)

    @compiled
    def span(call, unit, table, room, first, stop, _position):
        at = unit * width
        x, out = frame.operand(call, X) + at * element, frame.result(call, OUT) + at * element
        dt, d = frame.operand(call, DT) + at * WORD, frame.operand(call, D) + at * WORD
        b, c = frame.operand(call, B), frame.operand(call, C)
        for begin in range(first, stop, TURN):
            end = min(begin + TURN, stop)
            for column in range(0, width, LANES):
                rates = frame.operand(call, RATES) + (at + column) * rows * WORD
                skip = r.load(d + column * WORD)
                stays = end - begin > 1
                if stays:
                    for row in range(rows):
                        state = load_int64(table + row * ADDRESS) + column * WORD
                        r.prefetch(state + AHEAD * r.BYTES)
                        r.store(room + row * r.BYTES, r.load(state))
                for token in range(begin, end):
                    here = token * channels + column
                    value, step = load(x + here * element), r.load(dt + here * WORD)
                    added = r.multiply(step, value)
                    total = r.multiply(skip, value)
                    if stays:
                        for row in range(rows):
                            state = room + row * r.BYTES
                            total = advance(state, rates, row, token, step, added, total, b, c)
                    else:
                        for row in range(rows):
                            state = load_int64(table + row * ADDRESS) + column * WORD
                            r.prefetch(state + AHEAD * r.BYTES)
                            total = advance(state, rates, row, token, step, added, total, b, c)
                    store(out + here * element, total)
                if stays:
                    for row in range(rows):
                        state = r.load(room + row * r.BYTES)
                        r.store(load_int64(table + row * ADDRESS) + column * WORD, state)

    return make_kernel(f"jaxkv_selective_scan_{dtype}", units, span, rows * r.BYTES, element)
