"""The TPU kernels run by the interpreter, which simulates DMAs and finds races and reads out of bounds."""

from functools import partial

import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.recurrent import operations
from pallas_kernels.recurrent.choice import Implementation
from pallas_kernels.recurrent.tpu import decode_loop, matrices, matrix_decode, selective
from tests.pallas_kernels.recurrent.recurrences import (
    convolution,
    convolved_delta,
    delta,
    in_bfloat16,
    mamba1,
    mamba2,
    with_strong_decays,
)
from tests.pallas_kernels.recurrent.steps import Sequence, check, make_step

INTERPRET = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The kernels under the interpreter, through the public operations, with chunks of 8 tokens."""
    for name in ("CAUSAL_CONV1D", "SELECTIVE_SCAN", "SSD", "GATED_DELTA_RULE", "CONV_DELTA_RULE"):
        known = getattr(operations, name)
        run, refuses = known["pallas_tpu"]
        changed = known | {"pallas_tpu": Implementation(partial(run, interpret=INTERPRET), refuses)}
        monkeypatch.setattr(operations, name, changed)
    monkeypatch.setattr(matrices, "CHUNK", 8)
    monkeypatch.setattr(selective, "CHUNK", 8)


MIXED = [
    Sequence(before=0, new=1, starts_from_zeros=True, checkpoints=(1,)),
    Sequence(before=9, new=1, in_place=False),
    Sequence(before=7, new=0, in_place=False),
    Sequence(before=3, new=12, checkpoints=(5, 13)),
]


@pytest.mark.parametrize(
    ("operation", "dtype", "page_rows"),
    [
        (convolution(256), "bfloat16", 8),
        (mamba1(1024, 2), "bfloat16", 16),
        (mamba2(8, 64, 8, 2), "bfloat16", 16),
        (mamba2(4, 32, 8, skip=False), "float32", 16),
        (delta(1, 2, 16, 128), "float32", 16),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else str(value),
)
def test_a_mixed_step_with_checkpoints(operation, dtype, page_rows):
    step = make_step(operation, MIXED, dtype=dtype, page_rows=page_rows, spare_tokens=2, spare_rows=1)
    check(step, "pallas_tpu")


@pytest.mark.parametrize("operation", [mamba2(8, 64, 8), delta(2, 4, 8, 128)], ids=["mamba2", "delta"])
def test_decodes_of_several_slabs(operation, monkeypatch):
    """More slabs than buffers, several of which read one key, and a row of padding."""
    monkeypatch.setattr(matrix_decode, "DECODE_BLOCKS", 1)
    sequences = [Sequence(before=4, new=1, in_place=row % 2 == 0) for row in range(3)]
    check(make_step(operation, sequences, page_rows=16, spare_rows=1, decode_only=True), "pallas_tpu")


@pytest.mark.parametrize("operation", [mamba1(1024, 2), mamba2(4, 32, 8)], ids=["mamba1", "mamba2"])
def test_more_decodes_than_buffers(operation):
    """Two groups of sequences, the second not a whole one."""
    sequences = [Sequence(before=4, new=1, in_place=row % 3 == 0) for row in range(9)]
    sequences.append(Sequence(before=0, new=1, starts_from_zeros=True, checkpoints=(1,)))
    check(make_step(operation, sequences, page_rows=16, spare_rows=1, decode_only=True), "pallas_tpu")


DECODES = [
    Sequence(before=4, new=1, checkpoints=(5,)),
    Sequence(before=0, new=1, starts_from_zeros=True),
    Sequence(before=9, new=1, in_place=False, checkpoints=(10,)),
]


@pytest.mark.parametrize(
    ("operation", "layout"),
    [
        (convolved_delta(1, 2, 128), {"page_rows": 128}),
        (convolved_delta(2, 2, 128, 3, bias=False), {"page_rows": 64, "dtype": "bfloat16"}),
        (convolved_delta(1, 2, 128), {"page_rows": 64, "conv_dtype": "float32"}),
    ],
    ids=["bfloat16 by halves", "bfloat16 by inputs", "float32"],
)
def test_a_convolution_and_the_delta_rule_in_one_kernel(operation, layout):
    """Two parts of a state, in one pass: the inputs of the convolution in words of all kinds."""
    step = make_step(operation, DECODES, spare_rows=1, spare_tokens=1, decode_only=True, **layout)
    check(step, "pallas_tpu")


def test_more_convolved_decodes_than_buffers(monkeypatch):
    """Three groups, whose convolutions are copied one ahead, one of padding, and slabs of a head each."""
    monkeypatch.setattr(matrix_decode, "DECODE_BLOCKS", 1)
    sequences = [Sequence(before=4, new=1, in_place=row % 3 == 0) for row in range(5)]
    monkeypatch.setattr(decode_loop, "TOGETHER", 2)
    step = make_step(convolved_delta(1, 2, 128), sequences, page_rows=64, spare_rows=3, decode_only=True)
    check(step, "pallas_tpu")


def test_convolved_decodes_that_are_no_whole_number_of_groups(monkeypatch):
    """The last group asks for a sequence past the last row of the table, which keeps nothing."""
    monkeypatch.setattr(decode_loop, "TOGETHER", 2)
    sequences = [
        Sequence(before=4, new=1, checkpoints=(5,)),
        Sequence(before=9, new=1, in_place=False),
        Sequence(before=0, new=1, starts_from_zeros=True, checkpoints=(1,)),
    ]
    check(make_step(convolved_delta(1, 2, 128), sequences, page_rows=64, decode_only=True), "pallas_tpu")


def test_a_convolution_and_the_delta_rule_beside_a_prompt():
    """Then they are two operations."""
    sequences = [Sequence(before=4, new=1), Sequence(before=3, new=5, checkpoints=(5,))]
    check(make_step(convolved_delta(1, 2, 128), sequences, page_rows=64), "pallas_tpu")


def test_keys_that_hardly_differ(monkeypatch):
    """The hardest system of equations, at the size of a real chunk."""
    monkeypatch.setattr(matrices, "CHUNK", 64)
    check(
        make_step(delta(1, 1, 8, 128, alike=True), [Sequence(before=0, new=64)], page_rows=16), "pallas_tpu"
    )


@pytest.mark.parametrize("operation", [mamba2(2, 64, 8), delta(1, 1, 8, 128)], ids=["mamba2", "delta"])
def test_strong_decays_before_weak_ones(operation, monkeypatch):
    """Running sums of 4,800 are exact to 0.0005 only, and so would be weak decays as their differences."""
    monkeypatch.setattr(matrices, "CHUNK", 64)
    step = make_step(with_strong_decays(operation), [Sequence(before=3, new=64)], page_rows=16)
    check(step, "pallas_tpu")


@pytest.mark.parametrize("operation", [mamba2(2, 64, 8), delta(1, 1, 8, 128)], ids=["mamba2", "delta"])
def test_inputs_in_bfloat16(operation):
    """Products keep 16 bits of each number: states are much closer than the inputs' 8 bits."""
    step = make_step(in_bfloat16(operation), [Sequence(before=3, new=12)], page_rows=16)
    check(step, "pallas_tpu", rtol=1e-4)


def test_a_step_without_anything_to_do():
    check(make_step(delta(1, 1, 8, 128), [], page_rows=16, spare_rows=1, spare_tokens=3), "pallas_tpu")
