"""The gated delta rule's numbers for the chunks of `matrices`."""

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
from pallas_kernels.recurrent.cpu.units import LANES, Units, cut
from pallas_kernels.recurrent.cpu.walk import INPUTS, OUT, make_kernel, run_kernel
from pallas_kernels.recurrent.inputs import DeltaInputs, KeyScaling
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable

Q, K, V, LOGS, BETA, SCALING = range(INPUTS, INPUTS + 6)


def gated_delta_rule_numba(
    inputs: DeltaInputs,
    scaling: KeyScaling,
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    place: StatePlace,
) -> StepResult:
    """Same contract as `gated_delta_rule_reference`, but queries and keys are still to be scaled."""
    units = cut(place, matrices=True)
    assert isinstance(units, Units)  # the implementation was not refused
    q, k, v, g, beta = *inputs[:2], readable(inputs.v), *inputs[3:]
    _, heads, head_size = v.shape
    sizes = ChunkSizes(head_size, k.shape[2], heads // k.shape[1])
    values = [q.astype(v.dtype), k.astype(v.dtype), v]
    values += [value.astype(jnp.float32) for value in (g / log(2), beta)]
    normalised = scaling.eps is not None
    eps = 0.0 if scaling.eps is None else scaling.eps
    values.append(jnp.stack([jnp.asarray(x, jnp.float32) for x in (scaling.scale, eps)]))
    kernel = _kernel(units, sizes, np.dtype(v.dtype), normalised)
    out = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    return run_kernel(kernel, out, values, pages, batch, table, place)


@cache
def _kernel(units: Units, sizes: ChunkSizes, dtype: np.dtype, normalised: bool) -> Kernel:
    head_size, size, heads_of_key = sizes
    heads, element = units.count * units.columns // head_size, dtype.itemsize
    key_heads = heads // heads_of_key
    load = r.load_bfloat16 if element == 2 else r.load

    @compiled
    def load_one(source, target, factor, eps):
        squares = r.splat(np.float32(0))
        for at in range(0, size, LANES):
            value = load(source + at * element)
            squares = r.multiply_add(value, value, squares)
            r.store(target + at * WORD, value)
        if normalised:
            factor = factor / np.sqrt(r.sum_of_lanes(squares) + eps)
        for at in range(0, size * WORD, r.BYTES):
            r.store(target + at, r.multiply(r.splat(factor), r.load(target + at)))

    @compiled
    def load_keys(call, token, head, key, query):
        at = (token * key_heads + head // heads_of_key) * size * element
        scaling = frame.operand(call, SCALING)
        scale, eps = load_float32(scaling), load_float32(scaling + WORD)
        load_one(frame.operand(call, K) + at, key, np.float32(1), eps)
        load_one(frame.operand(call, Q) + at, query, scale, eps)

    @compiled
    def log_of_decay(call, token, head):
        return load_float32(frame.operand(call, LOGS) + (token * heads + head) * WORD)

    @compiled
    def share(call, token, head):
        return load_float32(frame.operand(call, BETA) + (token * heads + head) * WORD)

    @compiled
    def load_value(call, token, head, column):
        return load(frame.operand(call, V) + ((token * heads + head) * head_size + column) * element)

    @compiled
    def store_out(call, token, head, column, total):
        r.store(frame.result(call, OUT) + ((token * heads + head) * head_size + column) * WORD, total)

    rule = Rule(load_keys, log_of_decay, load_value, share, store_out, solves=True)
    span = make_span(units, sizes, rule)
    name = f"jaxkv_delta_{dtype}_{head_size}_{heads_of_key}_{normalised}"
    return make_kernel(name, units, span, span_bytes(sizes), WORD)
