"""Decode attention on a CPU: one query a sequence, pages read where they lie.

    piece        one KV head of one sequence, at most SPLIT positions of it; short ones several together
    chunk        CHUNK tokens: scores of all rows, one softmax step, sums of V
    tile         4, 2 or 1 rows x 4 or 1 tokens (scores), x 64 or 16 elements (sums)

K comes from memory once, and V with it: from the same words, or asked for while K is read. Where a sequence
is longer than SPLIT, pieces leave sums that are not divided yet, and a second kernel merges them, in the
order of positions. Pieces depend on positions alone: a sequence has the same bits in every batch and on any
number of threads. Sizes are numbers that kernels are given: two are compiled for a dtype, for all layouts.
"""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numba import types

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.cpu import frame, tiles, vectors
from pallas_kernels.cpu.instruction import compiled, instruction
from pallas_kernels.cpu.kernel import Kernel
from pallas_kernels.cpu.memory import INT32, INT64, allocate, free, load_float32, store_float32
from pallas_kernels.layout import LANES
from pallas_kernels.settings import AttentionSettings

SPLIT = 2048  # positions of a piece
CHUNK = 64  # tokens whose scores are in the first cache
AHEAD = 16  # tokens between what is asked of memory and what is read
_LINE = 64  # bytes: what a register of AVX-512 holds lies in one line of a cache
_TOGETHER = 2**15  # elements of K that a piece reads at least, where there are so many: some 5 us
_LOG2_E = tiles.LOG2_E
_LOWEST = np.finfo(np.float32).min  # scores of -infinity weigh nothing against it
_BESIDE = 2  # numbers behind a row's sums in what pieces leave: the largest score, the sum of weights

# Operands; merging has one more before `out`, what pieces left.
Q, PAGES, BLOCK_IDS, FIRST_BLOCK, SEQ_LENS, NUM_DECODES, SINKS, FACTORS, NUMBERS, PARTS = range(10)
# Numbers, int32: of the layer, then of its pages, in tokens, elements and words.
SLOT, SLOTS, WINDOW, LOCAL, CAPPED, HEADS, GROUP, SIZE, SIZE_V = range(9)
BLOCK_SIZE, PAGE_WORDS, HEAD_WORDS, K_WORDS, V_WORDS, V_BEGIN = range(9, 15)


def attend_decodes(
    out: jax.Array,
    q: jax.Array,
    pages: jax.Array,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
) -> jax.Array:
    """`out float32[T, Hq, Dv]` with the rows of decodes filled in."""
    layout = settings.layout
    rows, width = table.block_ids.shape
    group = q.shape[1] // layout.num_kv_heads
    sinks = jnp.full(q.shape[1], -jnp.inf) if settings.sinks is None else jnp.asarray(settings.sinks)
    scale = settings.scale * (1 if settings.softcap else _LOG2_E)
    operands = (
        q.astype(jnp.float32),
        pages,
        table.block_ids,
        table.first_block,
        batch.seq_lens,
        batch.num_decodes.reshape(1),
        sinks.astype(jnp.float32),
        jnp.array([scale, settings.softcap or 0], jnp.float32),
        _numbers(settings, group),
    )
    splits = _most_splits(width * layout.block_size, settings.span)
    parts_shape = (rows, layout.num_kv_heads, splits if splits > 1 else 0, group, layout.value_size + _BESIDE)
    result, parts = jax.ShapeDtypeStruct(out.shape, out.dtype), jax.ShapeDtypeStruct(parts_shape, jnp.float32)
    kernels = _kernels(layout.dtype)
    out, parts = kernels.attend([result, parts], *operands, out, in_place={len(operands): 0})
    if splits == 1:
        return out
    return kernels.merge([result], *operands, parts, out, in_place={len(operands) + 1: 0})[0]


def _numbers(settings: AttentionSettings, group: int) -> jax.Array:
    layout = settings.layout
    shared = layout.planes == 1  # V is in the words of K
    fixed = [
        settings.layer_slots,
        settings.sliding_window or 0,
        settings.attention_chunk_size or 0,
        settings.softcap is not None,
        layout.num_kv_heads,
        group,
        layout.head_size,
        layout.value_size,
        layout.block_size,
        layout.page_rows * LANES,
        layout.head_words,
        layout.token_words[0],
        layout.token_words[-1],
        0 if shared else layout.block_size * layout.token_words[0],
    ]
    return jnp.concatenate([jnp.asarray(settings.layer_slot, jnp.int32)[None], jnp.array(fixed, jnp.int32)])


def _most_splits(tokens: int, span: int | None) -> int:
    """Pieces that a span may have, of a table that holds `tokens` tokens."""
    most = tokens if span is None else min(tokens, span)
    return 1 if most == 1 else (most - 2) // SPLIT + 2


class _Kernels(NamedTuple):
    attend: Kernel
    merge: Kernel


@compiled
def _start(call, stop):
    """The first position that a query before position `stop` sees."""
    window, local = number_of(call, NUMBERS, WINDOW), number_of(call, NUMBERS, LOCAL)
    if window > 0:
        return stop - window if stop > window else 0
    return (stop - 1) // local * local if local > 0 else 0


@compiled
def _splits(call):
    splits = frame.result_size(call, 1, 2)
    return splits if splits > 1 else 1


@compiled
def _items_of_a_piece(call):
    total = 1
    for seq in range(number_of(call, NUM_DECODES, 0)):
        stop = number_of(call, SEQ_LENS, seq)
        total += stop - _start(call, stop)
    items = number_of(call, NUM_DECODES, 0) * _splits(call)
    return items * _TOGETHER // (total * number_of(call, NUMBERS, SIZE)) + 1


@compiled
def _pieces(call):
    together = _items_of_a_piece(call)
    items = number_of(call, NUM_DECODES, 0) * number_of(call, NUMBERS, HEADS) * _splits(call)
    return (items + together - 1) // together


@instruction(types.int64, types.int64)
def load_index(builder: Any, address: Any) -> Any:
    """An int32 as int64."""
    return builder.sext(builder.load(builder.inttoptr(address, INT32.as_pointer())), INT64)


@instruction(types.int64, types.int64, types.int64, types.int64)
def number_of(builder: Any, call: Any, index: Any, at: Any) -> Any:
    """An int32 of an operand, as int64."""
    start = frame.address_of_operand(builder, call, index)
    address = builder.inttoptr(builder.add(start, builder.shl(at, INT64(2))), INT32.as_pointer())
    return builder.sext(builder.load(address), INT64)


@compiled
def _finish(call, seq, head, sums, tops, totals):
    """Sinks, and the mean that sums are on the way to; tops and totals are one float32 a row."""
    group, size_v = number_of(call, NUMBERS, GROUP), number_of(call, NUMBERS, SIZE_V)
    row = (seq * number_of(call, NUMBERS, HEADS) + head) * group
    for r in range(group):
        top = load_float32(tops + 4 * r)
        sink = load_float32(frame.operand(call, SINKS) + 4 * (head * group + r)) * _LOG2_E
        most = sink if sink > top else top
        scale = tiles.exp2_of_negative(top - most)
        total = load_float32(totals + 4 * r) * scale + tiles.exp2_of_negative(sink - most)
        scale = np.float32(0) if total == 0 else scale / total
        out = frame.result(call, 0) + 4 * (row + r) * size_v
        tiles.scale_to(out, sums + 4 * r * size_v, size_v, scale)


@compiled
def _sequences(call):
    return number_of(call, NUM_DECODES, 0)


@compiled
def _merge(call, seq):
    stop = number_of(call, SEQ_LENS, seq)
    first, last = _start(call, stop) // SPLIT, (stop - 1) // SPLIT
    if first == last:
        return
    group, size_v, heads = (
        number_of(call, NUMBERS, GROUP),
        number_of(call, NUMBERS, SIZE_V),
        number_of(call, NUMBERS, HEADS),
    )
    row_bytes = 4 * (size_v + _BESIDE)
    split_bytes = group * row_bytes
    sums = allocate(4 * group * (size_v + 2))
    tops = sums + 4 * group * size_v
    totals = tops + 4 * group
    for head in range(heads):
        parts = frame.operand(call, PARTS)
        parts += (seq * heads + head) * frame.operand_size(call, PARTS, 2) * split_bytes
        for r in range(group):
            row = parts + r * row_bytes
            top = load_float32(row + 4 * size_v)
            for i in range(1, last - first + 1):
                other = load_float32(row + i * split_bytes + 4 * size_v)
                top = other if other > top else top
            total = np.float32(0)
            tiles.fill(sums + 4 * r * size_v, size_v, 0)
            for i in range(last - first + 1):
                part = row + i * split_bytes
                scale = tiles.exp2_of_negative(load_float32(part + 4 * size_v) - top)
                total += load_float32(part + 4 * size_v + 4) * scale
                tiles.add_scaled(sums + 4 * r * size_v, part, size_v, scale)
            store_float32(tops + 4 * r, top)
            store_float32(totals + 4 * r, total)
        _finish(call, seq, head, sums, tops, totals)
    free(sums)


@cache
def _kernels(dtype: str) -> _Kernels:
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

    @compiled
    def attend(call, seq, head, split):
        stop = number_of(call, SEQ_LENS, seq)
        start = _start(call, stop)
        first = start // SPLIT
        begin = start if split == 0 else (first + split) * SPLIT
        end = (first + split + 1) * SPLIT
        if end > stop:
            end = stop
        if begin >= end:
            return
        group, size, size_v, heads = (
            number_of(call, NUMBERS, GROUP),
            number_of(call, NUMBERS, SIZE),
            number_of(call, NUMBERS, SIZE_V),
            number_of(call, NUMBERS, HEADS),
        )
        block_size, k_token, v_token = (
            number_of(call, NUMBERS, BLOCK_SIZE),
            4 * number_of(call, NUMBERS, K_WORDS),
            4 * number_of(call, NUMBERS, V_WORDS),
        )
        page_bytes = 4 * number_of(call, NUMBERS, PAGE_WORDS)
        block_bytes = page_bytes * number_of(call, NUMBERS, SLOTS)
        pool = (
            frame.operand(call, PAGES)
            + number_of(call, NUMBERS, SLOT) * page_bytes
            + 4 * head * number_of(call, NUMBERS, HEAD_WORDS)
        )
        pool_v = pool + 4 * number_of(call, NUMBERS, V_BEGIN)
        ids = frame.operand(call, BLOCK_IDS) + 4 * seq * frame.operand_size(call, BLOCK_IDS, 1)
        ids -= 4 * number_of(call, FIRST_BLOCK, seq)

        scratch = allocate(4 * group * (size + CHUNK + size_v + 4) + _LINE)
        q = scratch + -scratch % _LINE
        scores = q + 4 * group * size
        sums = scores + 4 * group * CHUNK
        tops = sums + 4 * group * size_v
        totals, scales, ones = tops + 4 * group, tops + 8 * group, tops + 12 * group
        given = frame.operand(call, Q) + 4 * (seq * heads + head) * group * size
        tiles.scale_to(q, given, group * size, load_float32(frame.operand(call, FACTORS)))
        tiles.fill(sums, group * size_v, 0)
        for r in range(group):
            store_float32(tops + 4 * r, _LOWEST)
            store_float32(totals + 4 * r, 0)
            store_float32(ones + 4 * r, 1)

        position = begin
        while position < end:
            count = end - position if end - position < CHUNK else CHUNK
            done = 0
            while done < count:
                block, slot = (position + done) // block_size, (position + done) % block_size
                tokens = block_size - slot if block_size - slot < count - done else count - done
                tokens = AHEAD if tokens > AHEAD else tokens
                page = load_index(ids + 4 * block) * block_bytes
                k = pool + page + slot * k_token
                soon, ahead = k, position + done + AHEAD
                if ahead < end:
                    soon = pool + load_index(ids + 4 * (ahead // block_size)) * block_bytes
                    soon += ahead % block_size * k_token
                soon_too = pool_v + page + slot * v_token
                score_rows(call, q, k, tokens, soon, soon_too, scores + 4 * done)
                done += tokens
            weigh_rows(call, scores, count, tops, totals, scales)
            done = 0
            while done < count:
                block, slot = (position + done) // block_size, (position + done) % block_size
                tokens = block_size - slot if block_size - slot < count - done else count - done
                v = pool_v + load_index(ids + 4 * block) * block_bytes + slot * v_token
                sum_rows(call, scores + 4 * done, v, tokens, scales if done == 0 else ones, sums)
                done += tokens
            position += count

        if (stop - 1) // SPLIT == first:
            _finish(call, seq, head, sums, tops, totals)
        else:
            part = (seq * heads + head) * frame.result_size(call, 1, 2) + split
            part = frame.result(call, 1) + 4 * part * group * (size_v + _BESIDE)
            for r in range(group):
                tiles.scale_to(part, sums + 4 * r * size_v, size_v, 1)
                store_float32(part + 4 * size_v, load_float32(tops + 4 * r))
                store_float32(part + 4 * size_v + 4, load_float32(totals + 4 * r))
                part += 4 * (size_v + _BESIDE)
        free(scratch)

    @compiled
    def work(call, piece):
        together, heads = _items_of_a_piece(call), number_of(call, NUMBERS, HEADS)
        splits = _splits(call)
        items = number_of(call, NUM_DECODES, 0) * heads * splits
        last = (piece + 1) * together
        for item in range(piece * together, last if last < items else items):
            attend(call, item // splits // heads, item // splits % heads, item % splits)

    name = f"jaxkv_decode_{dtype}"
    return _Kernels(Kernel(name, _pieces, work), Kernel(f"{name}_merge", _sequences, _merge))


def _low_halves(builder: Any, address: Any) -> Any:
    return vectors.low_halves(builder, vectors.load_words(builder, address))


def _high_halves(builder: Any, address: Any) -> Any:
    return vectors.high_halves(builder, vectors.load_words(builder, address))
