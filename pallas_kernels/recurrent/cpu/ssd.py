"""Mamba 2's numbers for the chunks of `matrices`."""

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
from pallas_kernels.cpu.memory import load_float32
from pallas_kernels.recurrent.cpu.dtypes import readable
from pallas_kernels.recurrent.cpu.matrices import ChunkSizes, Rule, make_span, span_bytes
from pallas_kernels.recurrent.cpu.states import WORD
from pallas_kernels.recurrent.cpu.units import Units, cut
from pallas_kernels.recurrent.cpu.walk import INPUTS, OUT, make_kernel, run_kernel
from pallas_kernels.recurrent.inputs import SsdInputs
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable

X, DT, RATES, B, C, D = range(INPUTS, INPUTS + 6)


def ssd_numba(
    inputs: SsdInputs, pages: jax.Array, batch: RaggedBatch, table: StateTable, place: StatePlace
) -> StepResult:
    """Same contract as `ssd_reference`."""
    units = cut(place, matrices=True)
    assert isinstance(units, Units)  # the implementation was not refused
    x, dt, a, b, c, d = readable(inputs.x), *inputs[1:]
    _, heads, head_size = x.shape
    sizes = ChunkSizes(head_size, b.shape[2], heads // b.shape[1])
    d = jnp.zeros_like(a) if d is None else d
    values = [x, *(value.astype(jnp.float32) for value in (dt, a / log(2), b, c, d))]
    kernel = _kernel(units, sizes, np.dtype(x.dtype))
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return run_kernel(kernel, out, values, pages, batch, table, place)


@cache
def _kernel(units: Units, sizes: ChunkSizes, dtype: np.dtype) -> Kernel:
    head_size, size, heads_of_key = sizes
    heads, element = units.count * units.columns // head_size, dtype.itemsize
    groups = heads // heads_of_key
    load = r.load_bfloat16 if element == 2 else r.load

    @compiled
    def load_keys(call, token, head, key, query):
        at = (token * groups + head // heads_of_key) * size * WORD
        for one in range(0, size * WORD, r.BYTES):
            r.store(key + one, r.load(frame.operand(call, B) + at + one))
            r.store(query + one, r.load(frame.operand(call, C) + at + one))

    @compiled
    def step_of(call, token, head):
        return load_float32(frame.operand(call, DT) + (token * heads + head) * WORD)

    @compiled
    def log_of_decay(call, token, head):
        return step_of(call, token, head) * load_float32(frame.operand(call, RATES) + head * WORD)

    @compiled
    def value_of(call, token, head, column):
        return load(frame.operand(call, X) + ((token * heads + head) * head_size + column) * element)

    @compiled
    def load_value(call, token, head, column):
        return r.multiply(r.splat(step_of(call, token, head)), value_of(call, token, head, column))

    @compiled
    def store_out(call, token, head, column, total):
        skip = r.load_splat(frame.operand(call, D) + head * WORD)
        total = r.multiply_add(skip, value_of(call, token, head, column), total)
        r.store(frame.result(call, OUT) + ((token * heads + head) * head_size + column) * WORD, total)

    rule = Rule(load_keys, log_of_decay, load_value, step_of, store_out, solves=False)
    span = make_span(units, sizes, rule)
    name = f"jaxkv_ssd_{dtype}_{head_size}_{heads_of_key}"
    return make_kernel(name, units, span, span_bytes(sizes), WORD)
