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
"""Rows by which one token asks for a state before it needs them.

`table` is followed by the next state's, of which a token's last pass asks for all rows; after the last one as
many words as that and AHEAD.
"""
_FLOAT, _ADDRESS, _REGISTER = 4, 8, 4 * vectors.LANES  # bytes


@cache
def sums(count: int, across: int, *, ahead: bool = False) -> Any:
    """`sums(x, x_row, table, offset, rows, tokens, token_row)`: tokens get x times the state, summed.

    For `count` tokens and `across` registers of channels next to each other. ahead: ask for rows early.
    """

    @instruction(types.void, *[types.int64] * 7)
    def tile(
        b: Any, x: Any, x_row: Any, table: Any, offset: Any, rows: Any, tokens: Any, token_row: Any
    ) -> None:
        def body(index: Any, totals: list[Any]) -> list[Any]:
            row = _row(b, table, offset, index)
            if ahead:
                _ask(b, _row(b, table, offset, b.add(index, INT64(AHEAD))), across)
            state = [vectors.load_floats(b, vectors.at(b, row, i * _REGISTER)) for i in range(across)]
            new = []
            for token in range(count):
                factor = _factor(b, x, x_row, token, index)
                of_token = totals[token * across : (token + 1) * across]
                new += [vectors.multiply_add(b, factor, s, t) for s, t in zip(state, of_token, strict=True)]
            return new

        new = vectors.loop(b, rows, 1, [vectors.ZEROS] * (count * across), body)
        for token in range(count):
            at = b.add(tokens, b.mul(token_row, INT64(token)))
            for i in range(across):
                vectors.store_floats(b, new[token * across + i], vectors.at(b, at, i * _REGISTER))

    return tile


@cache
def grow(count: int, across: int) -> Any:
    """`grow(left, x, x_row, table, offset, rows, tokens, token_row)`: the state becomes `left` times itself
    plus each token's x times its registers. For as many tokens and registers as `sums`; one token's pass,
    which finds the state in a cache, asks for the state of the table behind."""

    @instruction(types.void, types.float32, *[types.int64] * 7)
    def tile(
        b: Any, left: Any, x: Any, x_row: Any, table: Any, offset: Any, rows: Any, tokens: Any, token_row: Any
    ) -> None:
        added = []
        for token in range(count):
            at = b.add(tokens, b.mul(token_row, INT64(token)))
            added += [vectors.load_floats(b, vectors.at(b, at, i * _REGISTER)) for i in range(across)]
        decay = vectors.splat(b, left)

        def body(index: Any, nothing: list[Any]) -> list[Any]:
            row = _row(b, table, offset, index)
            if count == 1:
                _ask(b, _row(b, table, offset, b.add(index, rows)), across)
            places = [vectors.at(b, row, i * _REGISTER) for i in range(across)]
            new = [b.fmul(decay, vectors.load_floats(b, place)) for place in places]
            for token in range(count):
                factor = _factor(b, x, x_row, token, index)
                values = added[token * across : (token + 1) * across]
                new = [vectors.multiply_add(b, factor, v, n) for v, n in zip(values, new, strict=True)]
            for value, place in zip(new, places, strict=True):
                vectors.store_floats(b, value, place)
            return nothing

        vectors.loop(b, rows, 1, [], body)

    return tile


@cache
def advance(across: int, heads: int) -> Any:
    """`advance(left, key, query, table, offset, rows, added, out)`: one token's change and sum in one pass.

    The state becomes what is left of it plus key times the registers at `added`, and `out` gets the query
    times that, summed. For `across` registers of channels next to each other, of as many heads: at `left` a
    number for each, a register apart. Rows are asked for early.
    """

    @instruction(types.void, *[types.int64] * 8)
    def tile(
        b: Any, left: Any, key: Any, query: Any, table: Any, offset: Any, rows: Any, added: Any, out: Any
    ) -> None:
        decays = [vectors.load_splat(b, vectors.at(b, left, i * _REGISTER)) for i in range(heads)]
        values = [vectors.load_floats(b, vectors.at(b, added, i * _REGISTER)) for i in range(across)]

        def body(index: Any, totals: list[Any]) -> list[Any]:
            row = _row(b, table, offset, index)
            _ask(b, _row(b, table, offset, b.add(index, INT64(AHEAD))), across)
            key_factor, query_factor = (_factor(b, x, INT64(0), 0, index) for x in (key, query))
            new = []
            for i, (value, total) in enumerate(zip(values, totals, strict=True)):
                place = vectors.at(b, row, i * _REGISTER)
                state = b.fmul(decays[i * heads // across], vectors.load_floats(b, place))
                state = vectors.multiply_add(b, key_factor, value, state)
                vectors.store_floats(b, state, place)
                new.append(vectors.multiply_add(b, query_factor, state, total))
            return new

        for i, total in enumerate(vectors.loop(b, rows, 1, [vectors.ZEROS] * across, body)):
            vectors.store_floats(b, total, vectors.at(b, out, i * _REGISTER))

    return tile


def _row(b: Any, table: Any, offset: Any, index: Any) -> Any:
    """The address of a row of the state."""
    at = b.inttoptr(b.add(table, b.mul(index, INT64(_ADDRESS))), INT64.as_pointer())
    return b.add(b.load(at), offset)


def _ask(b: Any, row: Any, across: int) -> None:
    for i in range(across):
        vectors.prefetch(b, vectors.at(b, row, i * _REGISTER))


def _factor(b: Any, x: Any, x_row: Any, token: int, index: Any) -> Any:
    at = b.add(b.add(x, b.mul(x_row, INT64(token))), b.mul(index, INT64(_FLOAT)))
    return vectors.load_splat(b, at)
