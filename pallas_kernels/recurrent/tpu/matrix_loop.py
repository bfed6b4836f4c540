"""The loop over decodes of matrix states, wherever their keys and values come from."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.tpu.decode_loop import At, DecodeLoop, DecodeOperand, group_size
from pallas_kernels.recurrent.tpu.matrix_decode import MatrixDecode
from pallas_kernels.recurrent.tpu.matrix_sizes import MatrixSizes
from pallas_kernels.recurrent.tpu.schedule import first_rows


def slab_operand(decode: MatrixDecode, value: jax.Array) -> DecodeOperand:
    """`[S, ...]` of all channels, slab by slab."""
    return DecodeOperand(value.reshape(value.shape[0], decode.num_slabs, decode.slab, LANES))


def head_operands(
    decode: MatrixDecode, sizes: MatrixSizes, rows: int, logs: jax.Array, beta: jax.Array | None
) -> list[DecodeOperand]:
    """Decays and, for the delta rule, beta of the first rows, on the lanes of their heads."""
    by_head = [jnp.exp(first_rows(logs, rows)), *([] if beta is None else [first_rows(beta, rows)])]
    return [slab_operand(decode, sizes.wide(value)) for value in by_head]


def matrix_loop(
    decode: MatrixDecode,
    out: DecodeOperand,
    *,
    keys: Callable[..., list[jax.Array]],
    vectors: Callable[..., list[Any]],
    scratch: tuple[Any, ...] = (),
    name: str,
) -> DecodeLoop:
    """A loop that returns outputs of the shape of `out` `[S, num_slabs, slab, 128]`.

    keys(operand refs, own scratch refs, beside): each sequence's rows, as `MatrixDecode.arrange` makes them.
    vectors(operand refs, own scratch refs): v, decays and, for the delta rule, beta, of a group's sequences.
    scratch: memory of one's own.
    """

    def prepare(operand_refs, scratch_refs, beside) -> None:
        columns, alike, ones, _, _, *own = scratch_refs
        decode.turn(keys(operand_refs, own, beside), columns, alike, ones)

    def ahead(at: At, scratch_refs) -> None:
        columns, _, ones, *tiles = scratch_refs[:5]
        decode.spread(at, columns, ones, tiles[at.slot])

    def compute(at: At, in_buffer, out_buffer, operand_refs, scratch_refs, out_ref) -> None:
        _, alike, _, *tiles = scratch_refs[:5]
        here = [ref.at[at.seq, at.slab] for ref in vectors(operand_refs, scratch_refs[5:])]
        out_here = out_ref.at[at.seq, at.slab]
        decode.compute(at, in_buffer, out_buffer, here, alike, tiles[at.slot], out_here)

    return DecodeLoop(
        num_slabs=decode.num_slabs,
        prepare=prepare,
        ahead=ahead,
        compute=compute,
        scratch=(*decode.scratch(group_size(out.array.shape[0])), *scratch),
        out=out,
        name=name,
    )
