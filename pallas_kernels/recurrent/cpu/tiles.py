"""Products of a chunk's keys with the rows of a state, 16 channels of it at a time.

Built for functions that numba compiles, so that sums stay in registers. `x` is as many rows as the chunk has
tokens, `x_row` bytes apart, with a float32 for each row of the state; `table` holds int64 addresses of those,
`offset` is in bytes from their starts. `tokens` is a register for each token, `token_row` bytes apart.
"""

from functools import cache
from typing import Any

from numba import types

from pallas_kernels.cpu import vectors
from pallas_kernels.cpu.instruction import instruction
from pallas_kernels.cpu.memory import INT64

AHEAD = 16
"""Rows by which one token asks for a state before it needs them; `table` is followed by as many words."""
_FLOAT, _ADDRESS, _REGISTER = 4, 8, 4 * vectors.LANES  # bytes


@cache
def sums(count: int, across: int) -> Any:
    """`sums(x, x_row, table, offset, rows, tokens, token_row)`: tokens get x times the state, summed.

    For `count` tokens and `across` registers of channels next to each other.
    """

    @instruction(types.void, *[types.int64] * 7)
    def tile(
        b: Any, x: Any, x_row: Any, table: Any, offset: Any, rows: Any, tokens: Any, token_row: Any
    ) -> None:
        before, loop, done = b.block, b.append_basic_block("row"), b.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        index = b.phi(INT64)
        totals = [b.phi(vectors.FLOATS) for _ in range(count * across)]
        row = _row(b, table, offset, index)
        if count == 1:
            soon = _row(b, table, offset, b.add(index, INT64(AHEAD)))
            for i in range(across):
                vectors.prefetch(b, vectors.at(b, soon, i * _REGISTER))
        state = [vectors.load_floats(b, vectors.at(b, row, i * _REGISTER)) for i in range(across)]
        new = []
        for token in range(count):
            factor = _factor(b, x, x_row, token, index)
            of_token = totals[token * across : (token + 1) * across]
            new += [vectors.multiply_add(b, factor, s, t) for s, t in zip(state, of_token, strict=True)]
        following = b.add(index, INT64(1))
        zeros = [INT64(0), *[vectors.ZEROS] * len(totals)]
        for phi, zero, value in zip([index, *totals], zeros, [following, *new], strict=True):
            phi.add_incoming(zero, before)
            phi.add_incoming(value, loop)
        b.cbranch(b.icmp_signed("<", following, rows), loop, done)
        b.position_at_end(done)
        for token in range(count):
            at = b.add(tokens, b.mul(token_row, INT64(token)))
            for i in range(across):
                vectors.store_floats(b, new[token * across + i], vectors.at(b, at, i * _REGISTER))

    return tile


@cache
def grow(count: int, across: int) -> Any:
    """`grow(left, x, x_row, table, offset, rows, tokens, token_row)`: the state becomes `left` times itself
    plus each token's x times its registers. For as many tokens and registers as `sums`."""

    @instruction(types.void, types.float32, *[types.int64] * 7)
    def tile(
        b: Any, left: Any, x: Any, x_row: Any, table: Any, offset: Any, rows: Any, tokens: Any, token_row: Any
    ) -> None:
        added = []
        for token in range(count):
            at = b.add(tokens, b.mul(token_row, INT64(token)))
            added += [vectors.load_floats(b, vectors.at(b, at, i * _REGISTER)) for i in range(across)]
        decay = vectors.splat(b, left)
        before, loop, done = b.block, b.append_basic_block("row"), b.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        index = b.phi(INT64)
        row = _row(b, table, offset, index)
        places = [vectors.at(b, row, i * _REGISTER) for i in range(across)]
        new = [b.fmul(decay, vectors.load_floats(b, place)) for place in places]
        for token in range(count):
            factor = _factor(b, x, x_row, token, index)
            values = added[token * across : (token + 1) * across]
            new = [vectors.multiply_add(b, factor, v, n) for v, n in zip(values, new, strict=True)]
        for value, place in zip(new, places, strict=True):
            vectors.store_floats(b, value, place)
        following = b.add(index, INT64(1))
        index.add_incoming(INT64(0), before)
        index.add_incoming(following, loop)
        b.cbranch(b.icmp_signed("<", following, rows), loop, done)
        b.position_at_end(done)

    return tile


def _row(b: Any, table: Any, offset: Any, index: Any) -> Any:
    """The address of a row of the state."""
    at = b.inttoptr(b.add(table, b.mul(index, INT64(_ADDRESS))), INT64.as_pointer())
    return b.add(b.load(at), offset)


def _factor(b: Any, x: Any, x_row: Any, token: int, index: Any) -> Any:
    at = b.add(b.add(x, b.mul(x_row, INT64(token))), b.mul(index, INT64(_FLOAT)))
    return vectors.load_splat(b, at)
