"""Products with matrices in panels: sums stay in registers while a panel passes by.

A tile of a few rows of x takes the outputs of one panel at a time (`pallas_kernels.panels`): a word of x, one
float32 or a pair of bfloat16, brings one load of its weights and, for each row, one multiply-add for each
register of them. Words are added one after another: an output has the same bits for any number of rows and
of threads.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from numba import njit, types

from pallas_kernels.cpu import bfloat16_pairs, frame, vectors
from pallas_kernels.cpu.instruction import instruction
from pallas_kernels.cpu.kernel import Kernel
from pallas_kernels.cpu.memory import INT64

_WORD = 4  # bytes
_ROWS = (6, 4, 2, 1)  # of tiles, the largest first
_PIECE = 2**18  # words that a piece reads, times its tiles of rows: some 30 us


def multiply(x: jax.Array, panels: jax.Array) -> jax.Array:
    """x[T, in] times the transposed matrix in panels: float32[T, out]. Both float32, or both bfloat16."""
    rows, num_panels, width = x.shape[0], panels.shape[0], panels.shape[2]
    out = jax.ShapeDtypeStruct((rows, num_panels * width), jnp.float32)
    return _kernel(panels.dtype == jnp.bfloat16, width)([out], x, panels)[0]


@cache
def _kernel(is_pairs: bool, width: int) -> Kernel:
    most_sums = _most_sums(is_pairs)
    tiles = [rows for rows in _ROWS if rows <= most_sums]
    most_rows = tiles[0]
    multiply_all = _nothing
    for rows in reversed(tiles):
        multiply_all = _in_tiles(rows, most_sums // rows, is_pairs, width, multiply_all)

    @njit
    def panels_of_a_piece(call):
        rows, panels = frame.operand_size(call, 0, 0), frame.operand_size(call, 1, 0)
        tiles = (rows + most_rows - 1) // most_rows
        return max(1, min(panels, _PIECE // max(1, frame.operand_size(call, 1, 1) * width * tiles)))

    @njit
    def pieces(call):
        group = panels_of_a_piece(call)
        return (frame.operand_size(call, 1, 0) + group - 1) // group

    @njit(error_model="numpy")
    def work(call, piece):
        rows, panels, words = (
            frame.operand_size(call, 0, 0),
            frame.operand_size(call, 1, 0),
            frame.operand_size(call, 1, 1),
        )
        group = panels_of_a_piece(call)
        for index in range(piece * group, min(panels, (piece + 1) * group)):
            panel = frame.operand(call, 1) + index * words * width * _WORD
            out = frame.result(call, 0) + index * width * _WORD
            multiply_all(rows, frame.operand(call, 0), panel, words, out, panels * width * _WORD)

    return Kernel(f"jaxkv_panel_product_{'bfloat16' if is_pairs else 'float32'}_{width}", pieces, work)


def _most_sums(is_pairs: bool) -> int:
    """Registers' worth of sums that a tile keeps, with weights and x beside them, and none in memory."""
    wide = bfloat16_pairs.has("avx512f")  # else a vector of 16 takes two registers, or four
    if is_pairs and not bfloat16_pairs.has_instruction():
        return 12 if wide else 4
    return 24 if wide else 6


@njit
def _nothing(rows, x, panel, words, out, out_row):
    pass


def _in_tiles(rows: int, most_registers: int, is_pairs: bool, width: int, rest: Any) -> Any:
    """`multiply(rows, x, panel, words, out, out_row)` for numba: all rows of x times one panel, by tiles of
    so many rows and registers, and what is left by `rest`."""
    registers = width // vectors.LANES
    while registers > most_registers:
        registers //= 2
    step, columns = registers * vectors.LANES * _WORD, width // (registers * vectors.LANES)
    tile = _tile(rows, registers, is_pairs, width)

    @njit(error_model="numpy")
    def multiply(left, x, panel, words, out, out_row):
        while left >= rows:
            for column in range(columns):
                tile(x, words * _WORD, panel + column * step, words, out + column * step, out_row)
            left -= rows
            x += rows * words * _WORD
            out += rows * out_row
        rest(left, x, panel, words, out, out_row)

    return multiply


def _tile(rows: int, registers: int, is_pairs: bool, width: int) -> Any:
    """`tile(x, x_row, panel, words, out, out_row)` for numba: `rows` rows of x times so many registers of a
    panel's outputs. It takes addresses, and bytes from row to row.
    """
    multiply_add = bfloat16_pairs.multiply_add if is_pairs else vectors.multiply_add
    offsets = [register * vectors.LANES * _WORD for register in range(registers)]

    @instruction(types.void, *[types.int64] * 6)
    def tile(builder: Any, x: Any, x_row: Any, panel: Any, words: Any, out: Any, out_row: Any) -> None:
        def step(index: Any, sums: list[Any]) -> list[Any]:
            at = builder.add(panel, builder.mul(index, INT64(width * _WORD)))
            weights = [vectors.load_floats(builder, vectors.at(builder, at, offset)) for offset in offsets]
            at = builder.add(x, builder.mul(index, INT64(_WORD)))
            new = []
            for row in range(rows):
                value = vectors.load_splat(builder, builder.add(at, builder.mul(x_row, INT64(row))))
                of_row = sums[row * registers : (row + 1) * registers]
                new += [multiply_add(builder, value, w, s) for w, s in zip(weights, of_row, strict=True)]
            return new

        sums = vectors.loop(builder, words, 1, [vectors.ZEROS] * (rows * registers), step)
        for row in range(rows):
            at = builder.add(out, builder.mul(out_row, INT64(row)))
            of_row = sums[row * registers : (row + 1) * registers]
            for offset, total in zip(offsets, of_row, strict=True):
                vectors.store_floats(builder, total, vectors.at(builder, at, offset))

    return tile
