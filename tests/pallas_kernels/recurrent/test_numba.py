"""Kernels that numba compiles against float64 recurrences, token by token."""

import pytest

from tests.pallas_kernels.recurrent.recurrences import (
    convolved_delta,
    delta,
    in_bfloat16,
    mamba1,
    mamba2,
    with_strong_decays,
)
from tests.pallas_kernels.recurrent.steps import Sequence, check, make_step

OPERATIONS = {
    "mamba1": mamba1(48, 4),
    "mamba2": mamba2(4, 64, 16, 2),
    "delta": delta(2, 4, 16, 32),
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


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "delta"])
def test_inputs_in_bfloat16(name):
    step = make_step(in_bfloat16(OPERATIONS[name]), EVERY_LENGTH[:4], spare_tokens=3)
    check(step, "numba")


def test_the_delta_rule_behind_a_convolution_whose_state_is_whole_rows():
    step = make_step(convolved_delta(2, 4, 32), EVERY_LENGTH, part=0, page_rows=8, spare_tokens=2)
    check(step, "numba")


def test_a_convolution_whose_state_is_no_whole_rows_is_refused():
    """XLA would copy the pool between its convolution and the kernel."""
    with pytest.raises(ValueError, match="the convolution's state is no whole rows"):
        check(make_step(convolved_delta(1, 2, 16), EVERY_LENGTH[:1]), "numba")


@pytest.mark.parametrize("name", OPERATIONS)
def test_decodes_only(name):
    sequences = [
        Sequence(before=4, new=1),
        Sequence(before=0, new=1, starts_from_zeros=True),
        Sequence(before=15, new=1, in_place=False, checkpoints=(16,)),
    ]
    step = make_step(OPERATIONS[name], sequences, spare_tokens=5, spare_rows=2, decode_only=True)
    check(step, "numba")


@pytest.mark.parametrize(
    ("heads", "head_size", "groups"),
    [(4, 64, 4), (8, 32, 2), (8, 16, 1), (2, 256, 2)],
)
def test_one_token_of_heads_that_share_lanes_or_keys(heads, head_size, groups):
    """Heads in one row of the state are computed together where they have one key."""
    sequences = [Sequence(before=4, new=1), Sequence(before=9, new=1, in_place=False, checkpoints=(10,))]
    step = make_step(mamba2(heads, head_size, 16, groups), sequences, spare_tokens=1, decode_only=True)
    check(step, "numba")


def test_keys_that_hardly_differ():
    """The hardest system of equations: all off-diagonal entries near one."""
    check(make_step(delta(1, 1, 16, 16, alike=True), [Sequence(before=0, new=130)]), "numba")


@pytest.mark.parametrize("name", ["mamba2", "delta"])
def test_strong_decays_before_weak_ones(name):
    """Running sums of 1,200 are exact to 0.0001 only, and so would be weak decays as their differences."""
    operation = with_strong_decays(OPERATIONS[name])
    check(make_step(operation, [Sequence(before=3, new=50, checkpoints=(35,))]), "numba")


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_step_of_padding_only_changes_nothing(name):
    check(make_step(OPERATIONS[name], [], spare_tokens=4, spare_rows=2), "numba")
