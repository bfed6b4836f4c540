"""Decode attention on a CPU, for a chunk of tokens and the rows of a KV head: scores, weights, sums of V."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.cpu import frame, tiles, vectors
from pallas_kernels.cpu.decode_call import (
    CAPPED,
    FACTORS,
    GROUP,
    K_WORDS,
    NUMBERS,
    SIZE,
    SIZE_V,
    V_WORDS,
    number_of,
)
from pallas_kernels.cpu.instruction import compiled
from pallas_kernels.cpu.memory import load_float32, store_float32

CHUNK = 64
"""Tokens whose scores are in the first cache."""


class RowFunctions(NamedTuple):
    """Compiled by numba, in the order in which a chunk needs them."""

    score: Any
    weigh: Any
    sum: Any


@cache
def row_functions(dtype: str) -> RowFunctions:
    """For pages of float32 or bfloat16, of whatever sizes."""
    load_k, load_v = (
        (vectors.load_floats, vectors.load_floats) if dtype == "float32" else (_low_halves, _high_halves)
    )
    scores_4x4, scores_4x1 = tiles.score_tile(4, 4, load_k), tiles.score_tile(4, 1, load_k)
    scores_2x4, scores_2x1 = tiles.score_tile(2, 4, load_k), tiles.score_tile(2, 1, load_k)
    scores_1x4, scores_1x1 = tiles.score_tile(1, 4, load_k), tiles.score_tile(1, 1, load_k)
    sums_4x4, sums_4x1 = tiles.value_tile(4, 4, load_v), tiles.value_tile(4, 1, load_v)
    sums_2x4, sums_2x1 = tiles.value_tile(2, 4, load_v), tiles.value_tile(2, 1, load_v)
    sums_1x4, sums_1x1 = tiles.value_tile(1, 4, load_v), tiles.value_tile(1, 1, load_v)

    @compiled
    def score_rows(call, q, k, tokens, soon, soon_too, scores):
        """Scores of all rows and of tokens that lie one after another."""
        group, size, k_token = (
            number_of(call, NUMBERS, GROUP),
            number_of(call, NUMBERS, SIZE),
            4 * number_of(call, NUMBERS, K_WORDS),
        )
        t = 0
        while t < tokens:
            step = 4 if tokens - t >= 4 else 1
            at, row, left, first, second = scores + 4 * t, q, group, soon, soon_too
            while left > 0:
                rows = 4 if left >= 4 else (2 if left >= 2 else 1)
                if rows == 4 and step == 4:
                    scores_4x4(row, size, k, k_token, first, second, at, 4 * CHUNK)
                elif rows == 4:
                    scores_4x1(row, size, k, k_token, first, second, at, 4 * CHUNK)
                elif rows == 2 and step == 4:
                    scores_2x4(row, size, k, k_token, first, second, at, 4 * CHUNK)
                elif rows == 2:
                    scores_2x1(row, size, k, k_token, first, second, at, 4 * CHUNK)
                elif step == 4:
                    scores_1x4(row, size, k, k_token, first, second, at, 4 * CHUNK)
                else:
                    scores_1x1(row, size, k, k_token, first, second, at, 4 * CHUNK)
                left -= rows
                row += rows * 4 * size
                at += rows * 4 * CHUNK
                first, second = k, k
            t += step
            k += step * k_token
            soon += step * k_token
            soon_too += step * k_token

    @compiled
    def sum_rows(call, weights, v, tokens, scales, sums):
        """Adds V of tokens that lie one after another to the sums of all rows, which are scaled first."""
        group, size_v, v_token = (
            number_of(call, NUMBERS, GROUP),
            number_of(call, NUMBERS, SIZE_V),
            4 * number_of(call, NUMBERS, V_WORDS),
        )
        r = 0
        while r < group:
            rows = 4 if group - r >= 4 else (2 if group - r >= 2 else 1)
            w, scale = weights + r * 4 * CHUNK, scales + 4 * r
            e = 0
            while e < size_v:
                wide = size_v - e >= 64
                at, out = v + 4 * e, sums + 4 * (r * size_v + e)
                if rows == 4 and wide:
                    sums_4x4(w, 4 * CHUNK, at, v_token, tokens, scale, out, 4 * size_v)
                elif rows == 4:
                    sums_4x1(w, 4 * CHUNK, at, v_token, tokens, scale, out, 4 * size_v)
                elif rows == 2 and wide:
                    sums_2x4(w, 4 * CHUNK, at, v_token, tokens, scale, out, 4 * size_v)
                elif rows == 2:
                    sums_2x1(w, 4 * CHUNK, at, v_token, tokens, scale, out, 4 * size_v)
                elif wide:
                    sums_1x4(w, 4 * CHUNK, at, v_token, tokens, scale, out, 4 * size_v)
                else:
                    sums_1x1(w, 4 * CHUNK, at, v_token, tokens, scale, out, 4 * size_v)
                e += 64 if wide else vectors.LANES
            r += rows

    @compiled
    def weigh_rows(call, scores, count, tops, totals, scales):
        """Scores of a chunk become weights; brings each row's largest score and sum of weights up to date."""
        whole = (count + vectors.LANES - 1) // vectors.LANES * vectors.LANES
        for r in range(number_of(call, NUMBERS, GROUP)):
            row, end = scores + r * 4 * CHUNK, scores + r * 4 * CHUNK + 4 * count
            if number_of(call, NUMBERS, CAPPED) > 0:
                while end < row + 4 * whole:
                    store_float32(end, 0)
                    end += 4
                tiles.cap(row, whole, load_float32(frame.operand(call, FACTORS) + 4))
                end = row + 4 * count
            while end < row + 4 * whole:
                store_float32(end, -np.inf)
                end += 4
            old = load_float32(tops + 4 * r)
            top = tiles.largest(row, whole)
            top = old if old > top else top
            scale = tiles.exp2_of_negative(old - top)
            total = load_float32(totals + 4 * r) * scale + tiles.weigh(row, whole, top)
            store_float32(tops + 4 * r, top)
            store_float32(totals + 4 * r, total)
            store_float32(scales + 4 * r, scale)

    return RowFunctions(score_rows, weigh_rows, sum_rows)


def _low_halves(builder: Any, address: Any) -> Any:
    return vectors.low_halves(builder, vectors.load_words(builder, address))


def _high_halves(builder: Any, address: Any) -> Any:
    return vectors.high_halves(builder, vectors.load_words(builder, address))
