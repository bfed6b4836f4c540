"""Kernels that numba compiles against float64 recurrences, token by token."""

import pytest

from tests.pallas_kernels.recurrent.recurrences import in_bfloat16, mamba1
from tests.pallas_kernels.recurrent.steps import Sequence, check, make_step

OPERATIONS = {
    "mamba1": mamba1(48, 4),
}
EVERY_LENGTH = [
    Sequence(before=5, new=1),
    Sequence(before=0, new=1, starts_from_zeros=True, checkpoints=(1,)),
    Sequence(before=9, new=1, in_place=False),
    Sequence(before=3, new=63, checkpoints=(35, 66), in_place=False),
    Sequence(before=7, new=0, in_place=False),
    Sequence(before=0, new=64, starts_from_zeros=True),
    Sequence(before=16, new=65, checkpoints=(80,)),
    Sequence(before=0, new=200, starts_from_zeros=True, checkpoints=(1, 64, 100)),
    Sequence(before=2, new=2),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_lengths_around_a_chunk_in_one_step(name, dtype):
    # A layout of its own for each: other parts before and after, pages that end within a state.
    step = make_step(OPERATIONS[name], EVERY_LENGTH, dtype=dtype, spare_tokens=5, spare_rows=2)
    check(step, "numba")


@pytest.mark.parametrize("name", OPERATIONS)
def test_inputs_in_bfloat16(name):
    step = make_step(in_bfloat16(OPERATIONS[name]), EVERY_LENGTH[:4], spare_tokens=3)
    check(step, "numba")
