"""Mamba 2 and the gated delta rule on a TPU: both keep a matrix `[size, 128]` for each block of channels.

With key k, query q (Mamba 2: B and C), decay a and value v of a token, per block

    S = a S,   add = v (Mamba 2: dt x)   or   beta (v - k S) (delta rule),   S = S + k^T add,   o = q S

The size of a key is on sublanes of the state, channels are on lanes.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.inputs import DeltaInputs, SsdInputs
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.tpu.decode_loop import DecodeOperand
from pallas_kernels.recurrent.tpu.matrix_decode import MatrixDecode
from pallas_kernels.recurrent.tpu.matrix_loop import head_operands, matrix_loop, slab_operand
from pallas_kernels.recurrent.tpu.matrix_prefill import chunk_slab, pack_slab, unpack_slab
from pallas_kernels.recurrent.tpu.matrix_sizes import MatrixSizes, sizes_of
from pallas_kernels.recurrent.tpu.prefill_loop import Operand, PrefillLoop
from pallas_kernels.recurrent.tpu.products import BFLOAT16_TERMS, FLOAT32_TERMS
from pallas_kernels.recurrent.tpu.schedule import cut, first_rows, tile, untile
from pallas_kernels.recurrent.tpu.step import Step
from pallas_kernels.recurrent.tpu.support import is_packed

CHUNK = 64
PREFILL_BLOCKS = 8
"""Blocks whose products run side by side in prefill, so that one's latency hides another's."""


class Tokens(NamedTuple):
    """q, k `[T, Hk, size]`; v `[T, H, P]`; logs `[T, H]`, of the decays; beta `[T, H]`, delta rule only.

    terms: of a number in prefill's products.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    logs: jax.Array
    beta: jax.Array | None
    terms: int


def terms_for(dtype: jax.typing.DTypeLike) -> int:
    """Terms of a number in products of what was computed from inputs of `dtype`."""
    return BFLOAT16_TERMS if jnp.dtype(dtype) == jnp.bfloat16 else FLOAT32_TERMS


def ssd_tpu(
    inputs: SsdInputs,
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    place: StatePlace,
    *,
    interpret: Any = False,
) -> StepResult:
    """Same contract as `ssd_reference`. `interpret` is `pallas_call`'s."""
    x, dt = inputs.x.astype(jnp.float32), inputs.dt.astype(jnp.float32)
    tokens = Tokens(inputs.c, inputs.b, dt[..., None] * x, dt * inputs.a, None, terms_for(inputs.x.dtype))
    out, pages = _run(tokens, Step(pages, batch, table, place, interpret))
    if inputs.d is not None:
        real = (batch.seq_ids < batch.seq_lens.shape[0])[:, None, None]
        out = out + jnp.where(real, inputs.d[:, None] * x, 0)
    return StepResult(out, pages)


def gated_delta_rule_tpu(
    inputs: DeltaInputs,
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    place: StatePlace,
    *,
    interpret: Any = False,
) -> StepResult:
    """Same contract as `gated_delta_rule_reference`. `interpret` is `pallas_call`'s."""
    q, k, v, g, beta = inputs
    return _run(Tokens(q, k, v, g, beta, terms_for(v.dtype)), Step(pages, batch, table, place, interpret))


def _run(tokens: Tokens, step: Step) -> StepResult:
    sizes = sizes_of(step.place, tokens.k.shape[1])
    return step.run(partial(_decode, tokens, sizes), partial(_prefill, tokens, sizes))


def _decode(tokens: Tokens, sizes: MatrixSizes, step: Step) -> StepResult:
    """Outputs `[S, H, P]`."""
    rows = step.table.read.shape[0]
    decode = MatrixDecode.of(sizes, is_packed(step.place))

    values = slab_operand(decode, first_rows(tokens.v, rows))
    operands = [
        DecodeOperand(decode.arrange(first_rows(tokens.q, rows), first_rows(tokens.k, rows))),
        values,
        *head_operands(decode, sizes, rows, tokens.logs, tokens.beta),
    ]

    def keys(operand_refs, *_) -> list[jax.Array]:
        return [operand_refs[0][seq] for seq in range(operand_refs[0].shape[0])]

    def vectors(operand_refs, _) -> list[Any]:
        return operand_refs[1:]

    loop = matrix_loop(decode, values, keys=keys, vectors=vectors, name="matrix_state_decode")
    out, pages = loop.run(operands, step)
    return StepResult(out.reshape(rows, *tokens.v.shape[1:]), pages)


def _prefill(tokens: Tokens, sizes: MatrixSizes, step: Step) -> StepResult:
    """Outputs `[T, H, P]`."""
    chunks = cut(step.batch, step.table, CHUNK)
    count, packed = chunks.seq.shape[0], is_packed(step.place)
    slab = sizes.slab(PREFILL_BLOCKS, packed)
    num_slabs, keys = sizes.blocks // slab, sizes.keys(slab)
    per_key = max(sizes.sharing // slab, 1)

    def key_operand(value: jax.Array) -> Operand:
        array = tile(value, chunks, CHUNK).transpose(0, 2, 1, 3)  # [N, Hk, L, size]
        return Operand(
            array, (1, keys, CHUNK, sizes.size), lambda chunk, slab: (chunk, slab // per_key, 0, 0)
        )

    def channel_operand(value: jax.Array) -> Operand:
        array = value.reshape(count, CHUNK, sizes.blocks, LANES).transpose(0, 2, 1, 3)  # [N, blocks, L, 128]
        return Operand(array, (1, slab, CHUNK, LANES), lambda chunk, slab: (chunk, slab, 0, 0))

    logs = tile(tokens.logs, chunks, CHUNK).transpose(0, 2, 1)
    logs = logs.reshape(count, sizes.blocks, sizes.together, CHUNK)
    values = channel_operand(tile(tokens.v, chunks, CHUNK))
    operands = [
        key_operand(tokens.q),
        key_operand(tokens.k),
        values,
        Operand(logs, (1, slab, sizes.together, CHUNK), lambda chunk, slab: (chunk, slab, 0, 0)),
    ]
    if tokens.beta is not None:
        operands.append(channel_operand(sizes.wide(tile(tokens.beta, chunks, CHUNK))))
    loop = PrefillLoop(
        num_slabs=num_slabs,
        state_shape=(slab, sizes.size, LANES),
        unpack=partial(unpack_slab, sizes.size, packed),
        pack=partial(pack_slab, sizes.size, packed),
        compute=partial(chunk_slab, sizes.head_size, max(slab // keys, 1), tokens.terms),
        out=values,
        name="matrix_state_prefill",
    )
    out, pages = loop.run(operands, chunks, step)
    out = out.transpose(0, 2, 1, 3).reshape(count, CHUNK, *tokens.v.shape[1:])
    return StepResult(untile(out, chunks, step.batch), pages)
