"""Tiles of decode attention, for numba: scores of a few rows and tokens, weights, sums of V.

Rows are queries that share a KV head. Sums of a tile stay in registers; everything else is read from where it
lies, pages from the pool itself. Addresses and strides are in bytes. K and V are read by loaders
`load(builder, address)` of 16 words.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from pallas_kernels.cpu import vectors
from pallas_kernels.cpu.instruction import instruction
from pallas_kernels.cpu.memory import FLOAT, INT32, INT64
from pallas_kernels.recurrent.xla.exponentials import COEFFICIENTS, LEAST, ROUNDER

Loader = Callable[[Any, Any], Any]
STEP = 4 * vectors.LANES  # bytes of 16 words

LOG2_E = 1.4426950408889634
_ROUNDER = ROUNDER + 127  # leaves the rounded number with the bias of an exponent in the low bits
_TANH = (1.0, -1 / 3, 2 / 15, -17 / 315)
"""tanh(y) / y by powers of y^2: relative error 2e-9 below _SMALL, where 1 - exp(-2 y) loses digits."""
_SMALL = 0.125


def score_tile(rows: int, tokens: int, load: Loader) -> Any:
    """`tile(q, size, k, k_token, soon, soon_too, out, out_row)`: float32 products of queries and keys.

    Of `rows` queries of `size` float32 elements, one after another, and `tokens` keys. soon, soon_too: where
    to begin to fetch as many bytes as the keys have, for what is read next.
    """

    @instruction(types.void, *[types.int64] * 8)
    def tile(
        builder: Any,
        q: Any,
        size: Any,
        k: Any,
        k_token: Any,
        soon: Any,
        soon_too: Any,
        out: Any,
        out_row: Any,
    ) -> None:
        q_row = builder.mul(size, INT64(4))

        def step(at: Any, old: list[Any]) -> list[Any]:
            for t in range(tokens):
                vectors.prefetch(builder, _plus(builder, soon, k_token, t, at))
                vectors.prefetch(builder, _plus(builder, soon_too, k_token, t, at))
            queries = [vectors.load_floats(builder, _plus(builder, q, q_row, r, at)) for r in range(rows)]
            keys = [load(builder, _plus(builder, k, k_token, t, at)) for t in range(tokens)]
            return _add_products(builder, queries, keys, old)

        sums = vectors.loop(builder, q_row, STEP, [vectors.ZEROS] * (rows * tokens), step)
        for r in range(rows):
            for t in range(tokens):
                total = vectors.sum_of_lanes(builder, sums[r * tokens + t])
                at = vectors.at(builder, _plus(builder, out, out_row, r), 4 * t)
                builder.store(total, builder.inttoptr(at, FLOAT.as_pointer()), align=4)

    return tile


def value_tile(rows: int, registers: int, load: Loader) -> Any:
    """`tile(weights, weights_row, v, v_token, tokens, scales, sums, sums_row)`: sums scales + weights V.

    For `rows` rows and 16 * `registers` elements of V; weights and scales (one a row) are float32.
    """

    @instruction(types.void, *[types.int64] * 8)
    def tile(
        builder: Any,
        weights: Any,
        weights_row: Any,
        v: Any,
        v_token: Any,
        tokens: Any,
        scales: Any,
        sums: Any,
        sums_row: Any,
    ) -> None:
        start = []
        for r in range(rows):
            scale = vectors.load_splat(builder, vectors.at(builder, scales, 4 * r))
            for i in range(registers):
                at = vectors.at(builder, _plus(builder, sums, sums_row, r), i * STEP)
                start.append(builder.fmul(vectors.load_floats(builder, at), scale))

        def add(at: Any, old: list[Any]) -> list[Any]:
            token = builder.add(v, builder.mul(v_token, builder.udiv(at, INT64(4))))
            values = [load(builder, vectors.at(builder, token, i * STEP)) for i in range(registers)]
            ws = [
                vectors.load_splat(builder, _plus(builder, weights, weights_row, r, at)) for r in range(rows)
            ]
            return _add_products(builder, ws, values, old)

        new = vectors.loop(builder, builder.mul(tokens, INT64(4)), 4, start, add)
        for r in range(rows):
            for i in range(registers):
                at = vectors.at(builder, _plus(builder, sums, sums_row, r), i * STEP)
                vectors.store_floats(builder, new[r * registers + i], at)

    return tile


@instruction(types.float32, types.int64, types.int64)
def largest(builder: Any, numbers: Any, count: Any) -> Any:
    """The largest of `count` float32, a multiple of 16."""

    def step(at: Any, old: list[Any]) -> list[Any]:
        new = vectors.load_floats(builder, builder.add(numbers, at))
        return [builder.select(builder.fcmp_ordered(">", new, old[0]), new, old[0])]

    lowest = ir.Constant(vectors.FLOATS, [float("-inf")] * vectors.LANES)
    (top,) = vectors.loop(builder, builder.mul(count, INT64(4)), STEP, [lowest], step)
    return vectors.fold_lanes(
        builder, top, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b)
    )


@instruction(types.void, types.int64, types.int64, types.float32)
def fill(builder: Any, numbers: Any, count: Any, value: Any) -> None:
    """A value for `count` float32, a multiple of 16."""

    def step(at: Any, old: list[Any]) -> list[Any]:
        vectors.store_floats(builder, vectors.splat(builder, value), builder.add(numbers, at))
        return old

    vectors.loop(builder, builder.mul(count, INT64(4)), STEP, [], step)


@instruction(types.void, types.int64, types.int64, types.int64, types.float32)
def scale_to(builder: Any, target: Any, source: Any, count: Any, scale: Any) -> None:
    """target = source * scale, `count` float32, a multiple of 16."""
    factor = vectors.splat(builder, scale)

    def step(at: Any, old: list[Any]) -> list[Any]:
        value = builder.fmul(vectors.load_floats(builder, builder.add(source, at)), factor)
        vectors.store_floats(builder, value, builder.add(target, at))
        return old

    vectors.loop(builder, builder.mul(count, INT64(4)), STEP, [], step)


@instruction(types.void, types.int64, types.int64, types.int64, types.float32)
def add_scaled(builder: Any, target: Any, source: Any, count: Any, scale: Any) -> None:
    """target = target + source * scale, `count` float32, a multiple of 16."""
    factor = vectors.splat(builder, scale)

    def step(at: Any, old: list[Any]) -> list[Any]:
        value = vectors.load_floats(builder, builder.add(source, at))
        place = builder.add(target, at)
        value = vectors.multiply_add(builder, value, factor, vectors.load_floats(builder, place))
        vectors.store_floats(builder, value, place)
        return old

    vectors.loop(builder, builder.mul(count, INT64(4)), STEP, [], step)


@instruction(types.float32, types.int64, types.int64, types.float32)
def weigh(builder: Any, scores: Any, count: Any, largest: Any) -> Any:
    """Scores 2^(score - largest) in place, `count` of them, a multiple of 16; their sum."""
    top = vectors.splat(builder, largest)

    def step(at: Any, old: list[Any]) -> list[Any]:
        place = builder.add(scores, at)
        weights = exp2(builder, builder.fsub(vectors.load_floats(builder, place), top))
        vectors.store_floats(builder, weights, place)
        return [builder.fadd(old[0], weights)]

    (total,) = vectors.loop(builder, builder.mul(count, INT64(4)), STEP, [vectors.ZEROS], step)
    return vectors.sum_of_lanes(builder, total)


@instruction(types.void, types.int64, types.int64, types.float32)
def cap(builder: Any, scores: Any, count: Any, softcap: Any) -> None:
    """Scores log2(e) softcap tanh(score / softcap) in place, `count` of them, a multiple of 16."""
    most = vectors.splat(builder, builder.fmul(softcap, FLOAT(LOG2_E)))
    over = vectors.splat(builder, builder.fdiv(FLOAT(1.0), softcap))
    sign = ir.Constant(vectors.WORDS, [0x80000000] * vectors.LANES)

    def step(at: Any, old: list[Any]) -> list[Any]:
        place = builder.add(scores, at)
        score = vectors.load_floats(builder, place)
        # tanh(y) = (1 - e) / (1 + e) with e = exp(-2 y) for y = |score / softcap|; the sign is put back.
        bits = builder.bitcast(score, vectors.WORDS)
        negative = builder.fmul(builder.bitcast(builder.or_(bits, sign), vectors.FLOATS), over)
        power = exp2(builder, builder.fmul(negative, vectors.constant(2 * LOG2_E)))
        one = vectors.constant(1.0)
        tanh = builder.fdiv(builder.fsub(one, power), builder.fadd(one, power))
        is_small = builder.fcmp_ordered(">", negative, vectors.constant(-_SMALL))
        tanh = builder.select(is_small, _tanh_of_small(builder, builder.fneg(negative)), tanh)
        signed = builder.or_(builder.bitcast(tanh, vectors.WORDS), builder.and_(bits, sign))
        vectors.store_floats(builder, builder.fmul(builder.bitcast(signed, vectors.FLOATS), most), place)
        return old

    vectors.loop(builder, builder.mul(count, INT64(4)), STEP, [], step)


@instruction(types.float32, types.float32)
def exp2_of_negative(builder: Any, x: Any) -> Any:
    """2^x for one x <= 0."""
    return builder.extract_element(exp2(builder, vectors.splat(builder, x)), INT32(0))


def exp2(builder: Any, x: Any) -> Any:
    """2^x of 16 float32 <= 0; 0 below 2^-126."""
    least = vectors.constant(LEAST)
    below = builder.fcmp_ordered("<", x, least)
    x = builder.select(below, least, x)
    shifted = builder.fadd(x, vectors.constant(_ROUNDER))
    fraction = builder.fsub(x, builder.fsub(shifted, vectors.constant(_ROUNDER)))
    value = vectors.polynomial(builder, fraction, COEFFICIENTS)
    shift = ir.Constant(vectors.WORDS, [23] * vectors.LANES)
    exponent = builder.bitcast(builder.shl(builder.bitcast(shifted, vectors.WORDS), shift), vectors.FLOATS)
    return builder.select(below, vectors.ZEROS, builder.fmul(value, exponent))  # of NaN, NaN


def _tanh_of_small(builder: Any, y: Any) -> Any:
    return builder.fmul(vectors.polynomial(builder, builder.fmul(y, y), _TANH), y)


def _plus(builder: Any, address: Any, stride: Any, times: int, more: Any = None) -> Any:
    """address + stride * times + more."""
    if times:
        address = builder.add(address, builder.mul(stride, INT64(times)))
    return address if more is None else builder.add(address, more)


def _add_products(builder: Any, rows: list[Any], columns: list[Any], sums: list[Any]) -> list[Any]:
    """Row times column on every sum, row after row."""
    pairs = ((row, column) for row in rows for column in columns)
    return [
        vectors.multiply_add(builder, row, column, total)
        for (row, column), total in zip(pairs, sums, strict=True)
    ]
