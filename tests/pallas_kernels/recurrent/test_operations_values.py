"""Every implementation that runs on a CPU against float64 recurrences, token by token."""

import pytest

from tests.pallas_kernels.recurrent.cases import (
    Sequence,
    check,
    convolution,
    delta,
    make_step,
    mamba1,
    mamba2,
)

IMPLEMENTATIONS = ["reference", "xla"]
OPERATIONS = {
    "conv": convolution(24),
    "mamba1": mamba1(24, 4),
    "mamba2": mamba2(4, 8, 16, 2),
    "delta": delta(2, 4, 16, 8),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_mixed_step_with_checkpoints(name, implementation):
    sequences = [
        Sequence(before=5, new=1),
        Sequence(before=0, new=1, starts_from_zeros=True, checkpoints=(1,)),
        Sequence(before=9, new=1, in_place=False),
        Sequence(before=3, new=64, checkpoints=(35, 67), in_place=False),
        Sequence(before=7, new=0, in_place=False),
        Sequence(before=0, new=150, starts_from_zeros=True, checkpoints=(1, 64, 100)),
        Sequence(before=16, new=2),
    ]
    step = make_step(OPERATIONS[name], sequences, spare_tokens=5, spare_rows=2)
    check(step, implementation)
