"""The second kernel of decode attention on a CPU: merges what pieces of a sequence left."""

import numpy as np

from pallas_kernels.cpu import frame, tiles
from pallas_kernels.cpu.decode_call import (
    BESIDE,
    GROUP,
    HEADS,
    NUMBERS,
    PARTS,
    SEQ_LENS,
    SIZE_V,
    SPLIT,
    finish,
    number_of,
    start_of,
)
from pallas_kernels.cpu.instruction import compiled
from pallas_kernels.cpu.memory import allocate, free, load_float32, store_float32


@compiled
def merge(call, seq):
    """Merges the pieces of one sequence, if there are several."""
    stop = number_of(call, SEQ_LENS, seq)
    first, last = start_of(call, stop) // SPLIT, (stop - 1) // SPLIT
    if first == last:
        return
    group, size_v, heads = (
        number_of(call, NUMBERS, GROUP),
        number_of(call, NUMBERS, SIZE_V),
        number_of(call, NUMBERS, HEADS),
    )
    row_bytes = 4 * (size_v + BESIDE)
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
        finish(call, seq, head, sums, tops, totals)
    free(sums)
