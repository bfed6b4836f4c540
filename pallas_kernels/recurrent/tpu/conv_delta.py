"""A convolution and the gated delta rule in one pass over the states of decodes.

a group of sequences    last inputs of the convolution in and out; queries, keys and values from it
a step: one slab        matrices in and out, as in `matrices.py`
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.conv_delta import ConvDeltaInputs, ConvDeltaPlace, in_turn
from pallas_kernels.recurrent.inputs import KeyScaling, scaled_first
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.tpu.conv import causal_conv1d_tpu
from pallas_kernels.recurrent.tpu.conv_words import ConvWords
from pallas_kernels.recurrent.tpu.decode_loop import DecodeOperand, group_size
from pallas_kernels.recurrent.tpu.matrices import gated_delta_rule_tpu
from pallas_kernels.recurrent.tpu.matrix_decode import MatrixDecode
from pallas_kernels.recurrent.tpu.matrix_loop import head_operands, matrix_loop
from pallas_kernels.recurrent.tpu.matrix_sizes import sizes_of
from pallas_kernels.recurrent.tpu.schedule import first_rows, merge
from pallas_kernels.recurrent.tpu.step import Step
from pallas_kernels.recurrent.tpu.support import is_packed


def conv_delta_rule_tpu(
    inputs: ConvDeltaInputs,
    scaling: KeyScaling,
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    place: ConvDeltaPlace,
    *,
    interpret: Any = False,
) -> StepResult:
    """Same contract as the two in turn, which is what runs where there are prompts. `interpret` is
    `pallas_call`'s.
    """
    if not batch.decode_only or not are_fused(place):
        conv, delta_rule = (
            partial(run, interpret=interpret) for run in (causal_conv1d_tpu, gated_delta_rule_tpu)
        )
        return in_turn(conv, scaled_first(delta_rule))(inputs, scaling, pages, batch, table, place)
    out, pages = _decode(inputs, scaling, Step(pages, batch, table, place.state, interpret), place)
    return StepResult(merge(out, None, batch), pages)


def are_fused(place: ConvDeltaPlace) -> bool:
    """Whether one kernel serves both parts: a head of queries or keys is a row of 128 channels."""
    words = ConvWords.of(place.conv)
    return place.state.shape[2] == LANES and (words.lines % 2 == 0 or not words.halves)


def _decode(inputs: ConvDeltaInputs, scaling: KeyScaling, step: Step, place: ConvDeltaPlace) -> StepResult:
    """Outputs `[S, Hv, dv]`."""
    rows, words = step.table.read.shape[0], ConvWords.of(place.conv)
    sizes = sizes_of(place.state, place.key_heads)
    decode = MatrixDecode.of(sizes, is_packed(place.state))

    def shared_operand(value: jax.Array) -> DecodeOperand:
        return DecodeOperand(value.astype(jnp.float32).reshape(-1, words.lines, LANES), shared=True)

    by_head = head_operands(decode, sizes, rows, inputs.g, inputs.beta)
    operands = [
        *by_head,
        DecodeOperand(first_rows(inputs.x, rows).reshape(rows, words.lines, LANES)),
        shared_operand(inputs.weight.T),
    ]
    if inputs.bias is not None:
        operands.append(shared_operand(inputs.bias))

    def keys(operand_refs, scratch_refs, beside) -> list[jax.Array]:
        _, _, x_ref, weight_ref, *bias_refs = operand_refs
        [values_ref], (inward, outward) = scratch_refs, beside
        arranged = []
        for seq in range(x_ref.shape[0]):
            window = [*words.inputs(inward.at[seq]), x_ref[seq]]
            words.store(window[1:], outward.at[seq])
            total = jnp.zeros_like(window[0])
            for tap, x in enumerate(window):
                total += x * weight_ref[tap]
            for bias_ref in bias_refs:
                total += bias_ref[0]
            total = jax.nn.silu(total) if inputs.silu else total
            total = total.astype(inputs.x.dtype).astype(jnp.float32)
            q, k, v = (total[first:stop] for first, stop in _lines(place))
            arranged.append(decode.arrange(*scaling(q, k)))
            values_ref[seq] = v.reshape(decode.num_slabs, decode.slab, LANES)
        return arranged

    def vectors(operand_refs, scratch_refs) -> list[Any]:
        return [*scratch_refs, *operand_refs[:2]]

    values = pltpu.VMEM((group_size(rows), decode.num_slabs, decode.slab, LANES), jnp.float32)
    loop = matrix_loop(
        decode, by_head[0], keys=keys, vectors=vectors, scratch=(values,), name="conv_delta_rule_decode"
    )
    out, pages = loop.run(operands, step, beside=place.conv)
    return StepResult(out.reshape(rows, *place.state.shape[:2]), pages)


def _lines(place: ConvDeltaPlace) -> list[tuple[int, int]]:
    """Rows of 128 channels of all queries, keys and values: first and stop."""
    keys = place.key_heads
    return [(0, keys), (keys, 2 * keys), (2 * keys, place.conv.shape[0] // LANES)]
