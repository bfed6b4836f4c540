"""What decode attention on a CPU is called with, by name; what a query sees, and its mean."""

from typing import Any

import numpy as np
from numba import types

from pallas_kernels.cpu import frame, tiles
from pallas_kernels.cpu.instruction import compiled, instruction
from pallas_kernels.cpu.memory import INT32, INT64, load_float32

SPLIT = 2048
"""Positions of a piece."""
BESIDE = 2
"""Numbers behind a row's sums in what pieces leave: the largest score, the sum of weights."""

# Operands; merging has one more before `out`, what pieces left.
Q, PAGES, BLOCK_IDS, FIRST_BLOCK, SEQ_LENS, NUM_DECODES, SINKS, FACTORS, NUMBERS, PARTS = range(10)
# Numbers, int32: of the layer, then of its pages, in tokens, elements and words.
SLOT, SLOTS, WINDOW, LOCAL, CAPPED, HEADS, GROUP, SIZE, SIZE_V = range(9)
BLOCK_SIZE, PAGE_WORDS, HEAD_WORDS, K_WORDS, V_WORDS, V_BEGIN = range(9, 15)


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
def start_of(call, stop):
    """The first position that a query before position `stop` sees."""
    window, local = number_of(call, NUMBERS, WINDOW), number_of(call, NUMBERS, LOCAL)
    if window > 0:
        return stop - window if stop > window else 0
    return (stop - 1) // local * local if local > 0 else 0


@compiled
def splits_of(call):
    """Pieces that a head of a sequence has at most."""
    splits = frame.result_size(call, 1, 2)
    return splits if splits > 1 else 1


@compiled
def finish(call, seq, head, sums, tops, totals):
    """Sinks, and the mean that sums are on the way to; tops and totals are one float32 a row."""
    group, size_v = number_of(call, NUMBERS, GROUP), number_of(call, NUMBERS, SIZE_V)
    row = (seq * number_of(call, NUMBERS, HEADS) + head) * group
    for r in range(group):
        top = load_float32(tops + 4 * r)
        sink = load_float32(frame.operand(call, SINKS) + 4 * (head * group + r)) * tiles.LOG2_E
        most = sink if sink > top else top
        scale = tiles.exp2_of_negative(top - most)
        total = load_float32(totals + 4 * r) * scale + tiles.exp2_of_negative(sink - most)
        scale = np.float32(0) if total == 0 else scale / total
        out = frame.result(call, 0) + 4 * (row + r) * size_v
        tiles.scale_to(out, sums + 4 * r * size_v, size_v, scale)
