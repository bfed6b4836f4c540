"""Products with matrices in panels: sums stay in registers while a panel passes by.

A tile of a few rows of x takes the outputs of one panel at a time (`pallas_kernels.panels`): an input brings
one load of its weights and, for each row, one multiply-add for each register of them. Inputs are added one
after another, every sum rounded once: an output has the same bits for any number of rows and of threads.
"""

from functools import cache
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import njit, types

from pallas_kernels.cpu import frame, vectors
from pallas_kernels.cpu.instruction import instruction
from pallas_kernels.cpu.kernel import Kernel
from pallas_kernels.cpu.memory import INT64

_FLOAT = 4  # bytes
_MOST_ROWS = 6  # of a tile: 24 registers of sums beside four of weights, of AVX-512's 32
_PIECE = 2**18  # weights that a piece reads, times its tiles of rows: some 30 us


def multiply(x: jax.Array, panels: jax.Array) -> jax.Array:
    """x[T, in] times the transposed matrix in panels, float32 or bfloat16: float32[T, out]."""
    rows, (num_panels, _, width) = x.shape[0], panels.shape
    out = jax.ShapeDtypeStruct((rows, num_panels * width), jnp.float32)
    return _kernel(np.dtype(panels.dtype), width)([out], x.astype(jnp.float32), panels)[0]


@cache
def _kernel(dtype: np.dtype, width: int) -> Kernel:
    weight = dtype.itemsize
    tiles = {rows: _tile(rows, width, weight) for rows in (1, 2, 4, _MOST_ROWS)}
    one, two, four, most = (tiles[rows] for rows in (1, 2, 4, _MOST_ROWS))

    @njit
    def panels_of_a_piece(call):
        rows, panels = frame.operand_size(call, 0, 0), frame.operand_size(call, 1, 0)
        tiles = (rows + _MOST_ROWS - 1) // _MOST_ROWS
        return max(1, min(panels, _PIECE // max(1, frame.operand_size(call, 1, 1) * width * tiles)))

    @njit
    def pieces(call):
        group = panels_of_a_piece(call)
        return (frame.operand_size(call, 1, 0) + group - 1) // group

    @njit(error_model="numpy")
    def work(call, piece):
        panels, inputs = frame.operand_size(call, 1, 0), frame.operand_size(call, 1, 1)
        x_row, out_row = inputs * _FLOAT, panels * width * _FLOAT
        group = panels_of_a_piece(call)
        for index in range(piece * group, min(panels, (piece + 1) * group)):
            panel = frame.operand(call, 1) + index * inputs * width * weight
            x, out = frame.operand(call, 0), frame.result(call, 0) + index * width * _FLOAT
            left = frame.operand_size(call, 0, 0)
            while left > 0:
                if left >= _MOST_ROWS:
                    rows = _MOST_ROWS
                    most(x, x_row, panel, inputs, out, out_row)
                elif left >= 4:
                    rows = 4
                    four(x, x_row, panel, inputs, out, out_row)
                elif left >= 2:
                    rows = 2
                    two(x, x_row, panel, inputs, out, out_row)
                else:
                    rows = 1
                    one(x, x_row, panel, inputs, out, out_row)
                left -= rows
                x += rows * x_row
                out += rows * out_row

    return Kernel(f"jaxkv_panel_product_{dtype}_{width}", pieces, work)


def _tile(rows: int, width: int, weight: int) -> Any:
    """`tile(x, x_row, panel, inputs, out, out_row)` for numba: `rows` rows of x times one panel.

    It takes addresses, and bytes from row to row. weight: bytes of a weight, 2 for bfloat16.
    """
    load = vectors.load_bfloat16 if weight == 2 else vectors.load_floats
    registers = width // vectors.LANES

    @instruction(types.void, *[types.int64] * 6)
    def tile(builder: Any, x: Any, x_row: Any, panel: Any, inputs: Any, out: Any, out_row: Any) -> None:
        before = builder.block
        loop, done = builder.append_basic_block("input"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(INT64)
        index.add_incoming(INT64(0), before)
        sums = [[builder.phi(vectors.FLOATS) for _ in range(registers)] for _ in range(rows)]
        at = builder.add(panel, builder.mul(index, INT64(width * weight)))
        weights = [
            load(builder, vectors.at(builder, at, r * vectors.LANES * weight)) for r in range(registers)
        ]
        at = builder.add(x, builder.mul(index, INT64(_FLOAT)))
        new_sums = []
        for row in range(rows):
            value = vectors.load_splat(builder, builder.add(at, builder.mul(x_row, INT64(row))))
            pairs = zip(weights, sums[row], strict=True)
            new_sums.append([vectors.multiply_add(builder, value, w, total) for w, total in pairs])
        following = builder.add(index, INT64(1))
        index.add_incoming(following, loop)
        for old, new in zip(chain(*sums), chain(*new_sums), strict=True):
            old.add_incoming(vectors.ZEROS, before)
            old.add_incoming(new, loop)
        builder.cbranch(builder.icmp_signed("<", following, inputs), loop, done)
        builder.position_at_end(done)
        for row in range(rows):
            at = builder.add(out, builder.mul(out_row, INT64(row)))
            for r, total in enumerate(new_sums[row]):
                vectors.store_floats(builder, total, vectors.at(builder, at, r * vectors.LANES * _FLOAT))

    return tile
