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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.cpu import decode_call as c
from pallas_kernels.cpu import frame, tiles
from pallas_kernels.cpu.decode_call import SPLIT
from pallas_kernels.cpu.decode_merge import merge
from pallas_kernels.cpu.decode_rows import CHUNK, row_functions
from pallas_kernels.cpu.instruction import compiled
from pallas_kernels.cpu.kernel import Kernel
from pallas_kernels.cpu.memory import allocate, free, load_float32, store_float32
from pallas_kernels.layout import LANES
from pallas_kernels.settings import AttentionSettings

AHEAD = 16  # tokens between what is asked of memory and what is read
_LINE = 64  # bytes: what a register of AVX-512 holds lies in one line of a cache
_TOGETHER = 2**15  # elements of K that a piece reads at least, where there are so many: some 5 us
_LOWEST = np.finfo(np.float32).min  # scores of -infinity weigh nothing against it


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
    scale = settings.scale * (1 if settings.softcap else tiles.LOG2_E)
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
    parts_shape = (
        rows,
        layout.num_kv_heads,
        splits if splits > 1 else 0,
        group,
        layout.value_size + c.BESIDE,
    )
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
def _items_of_a_piece(call):
    total = 1
    for seq in range(c.number_of(call, c.NUM_DECODES, 0)):
        stop = c.number_of(call, c.SEQ_LENS, seq)
        total += stop - c.start_of(call, stop)
    items = c.number_of(call, c.NUM_DECODES, 0) * c.splits_of(call)
    return items * _TOGETHER // (total * c.number_of(call, c.NUMBERS, c.SIZE)) + 1


@compiled
def _pieces(call):
    together = _items_of_a_piece(call)
    items = c.number_of(call, c.NUM_DECODES, 0) * c.number_of(call, c.NUMBERS, c.HEADS) * c.splits_of(call)
    return (items + together - 1) // together


@compiled
def _sequences(call):
    return c.number_of(call, c.NUM_DECODES, 0)


@cache
def _kernels(dtype: str) -> _Kernels:
    """For pages of float32 or bfloat16, of whatever sizes."""
    score_rows, weigh_rows, sum_rows = row_functions(dtype)

    @compiled
    def attend(call, seq, head, split):
        stop = c.number_of(call, c.SEQ_LENS, seq)
        start = c.start_of(call, stop)
        first = start // SPLIT
        begin = start if split == 0 else (first + split) * SPLIT
        end = (first + split + 1) * SPLIT
        if end > stop:
            end = stop
        if begin >= end:
            return
        group, size, size_v, heads = (
            c.number_of(call, c.NUMBERS, c.GROUP),
            c.number_of(call, c.NUMBERS, c.SIZE),
            c.number_of(call, c.NUMBERS, c.SIZE_V),
            c.number_of(call, c.NUMBERS, c.HEADS),
        )
        block_size, k_token, v_token = (
            c.number_of(call, c.NUMBERS, c.BLOCK_SIZE),
            4 * c.number_of(call, c.NUMBERS, c.K_WORDS),
            4 * c.number_of(call, c.NUMBERS, c.V_WORDS),
        )
        page_bytes = 4 * c.number_of(call, c.NUMBERS, c.PAGE_WORDS)
        block_bytes = page_bytes * c.number_of(call, c.NUMBERS, c.SLOTS)
        pool = (
            frame.operand(call, c.PAGES)
            + c.number_of(call, c.NUMBERS, c.SLOT) * page_bytes
            + 4 * head * c.number_of(call, c.NUMBERS, c.HEAD_WORDS)
        )
        pool_v = pool + 4 * c.number_of(call, c.NUMBERS, c.V_BEGIN)
        ids = frame.operand(call, c.BLOCK_IDS) + 4 * seq * frame.operand_size(call, c.BLOCK_IDS, 1)
        ids -= 4 * c.number_of(call, c.FIRST_BLOCK, seq)

        scratch = allocate(4 * group * (size + CHUNK + size_v + 4) + _LINE)
        q = scratch + -scratch % _LINE
        scores = q + 4 * group * size
        sums = scores + 4 * group * CHUNK
        tops = sums + 4 * group * size_v
        totals, scales, ones = tops + 4 * group, tops + 8 * group, tops + 12 * group
        given = frame.operand(call, c.Q) + 4 * (seq * heads + head) * group * size
        tiles.scale_to(q, given, group * size, load_float32(frame.operand(call, c.FACTORS)))
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
                page = c.load_index(ids + 4 * block) * block_bytes
                k = pool + page + slot * k_token
                soon, ahead = k, position + done + AHEAD
                if ahead < end:
                    soon = pool + c.load_index(ids + 4 * (ahead // block_size)) * block_bytes
                    soon += ahead % block_size * k_token
                soon_too = pool_v + page + slot * v_token
                score_rows(call, q, k, tokens, soon, soon_too, scores + 4 * done)
                done += tokens
            weigh_rows(call, scores, count, tops, totals, scales)
            done = 0
            while done < count:
                block, slot = (position + done) // block_size, (position + done) % block_size
                tokens = block_size - slot if block_size - slot < count - done else count - done
                v = pool_v + c.load_index(ids + 4 * block) * block_bytes + slot * v_token
                sum_rows(call, scores + 4 * done, v, tokens, scales if done == 0 else ones, sums)
                done += tokens
            position += count

        if (stop - 1) // SPLIT == first:
            c.finish(call, seq, head, sums, tops, totals)
        else:
            part = (seq * heads + head) * frame.result_size(call, 1, 2) + split
            part = frame.result(call, 1) + 4 * part * group * (size_v + c.BESIDE)
            for r in range(group):
                tiles.scale_to(part, sums + 4 * r * size_v, size_v, 1)
                store_float32(part + 4 * size_v, load_float32(tops + 4 * r))
                store_float32(part + 4 * size_v + 4, load_float32(totals + 4 * r))
                part += 4 * (size_v + c.BESIDE)
        free(scratch)

    @compiled
    def work(call, piece):
        together, heads = _items_of_a_piece(call), c.number_of(call, c.NUMBERS, c.HEADS)
        splits = c.splits_of(call)
        items = c.number_of(call, c.NUM_DECODES, 0) * heads * splits
        last = (piece + 1) * together
        for item in range(piece * together, last if last < items else items):
            attend(call, item // splits // heads, item // splits % heads, item % splits)

    name = f"jaxkv_decode_{dtype}"
    return _Kernels(Kernel(name, _pieces, work), Kernel(f"{name}_merge", _sequences, merge))
