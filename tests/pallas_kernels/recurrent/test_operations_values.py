"""The implementations that run on a CPU against float64 recurrences, token by token."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrent.triangle import unit_lower_inverse
from pallas_kernels.recurrent.xla import walk
from pallas_kernels.recurrent.xla.exponentials import exp2_of_negative
from pallas_kernels.recurrent.xla.substitution import solve_unit_lower
from tests.pallas_kernels.recurrent.recurrences import (
    convolution,
    convolved_delta,
    delta,
    mamba1,
    mamba2,
    with_strong_decays,
)
from tests.pallas_kernels.recurrent.steps import Sequence, check, make_step

OPERATIONS = {
    "conv": convolution(24),
    "mamba1": mamba1(24, 4),
    "mamba2": mamba2(4, 8, 16, 2),
    "delta": delta(2, 4, 16, 8),
    "conv and delta": convolved_delta(1, 2, 8),
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


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_lengths_around_a_chunk_in_one_step(name, implementation):
    step = make_step(OPERATIONS[name], EVERY_LENGTH, spare_tokens=5, spare_rows=2)
    check(step, implementation)


@pytest.mark.parametrize(
    ("operation", "layout"),
    [
        (convolution(128, 3, bias=False, silu=False), {"part": 0, "dtype": "bfloat16", "layer_slots": 1}),
        (mamba1(16, 8), {"dtype": "bfloat16", "beside": (5, 3)}),
        (mamba2(2, 64, 128, 1, skip=False), {"page_rows": 24, "layer_slot": 0, "layer_slots": 3}),
        (mamba2(6, 8, 8, 6), {"beside": (300, 3), "page_rows": 8}),
        (delta(1, 2, 128, 128), {"page_rows": 16, "layer_slot": 2, "layer_slots": 2}),
    ],
    ids=["conv, rows", "mamba1, words", "mamba2, many pages", "mamba2, split heads", "delta, second block"],
)
def test_layouts_and_large_states(operation, layout, monkeypatch):
    """States of several pages and blocks, on rows and on words, decoded one by one."""
    monkeypatch.setattr(walk, "BATCH_BYTES", 0)
    sequences = [
        Sequence(before=5, new=1, in_place=False),
        Sequence(before=0, new=1, starts_from_zeros=True),
        Sequence(before=3, new=9, checkpoints=(5,)),
    ]
    check(make_step(operation, sequences, spare_rows=1, **({"layer_slot": 0} | layout)), "xla")


@pytest.mark.parametrize("name", OPERATIONS)
def test_decodes_only(name):
    sequences = [
        Sequence(before=4, new=1),
        Sequence(before=0, new=1, starts_from_zeros=True),
        Sequence(before=15, new=1, in_place=False, checkpoints=(16,)),
    ]
    check(make_step(OPERATIONS[name], sequences, spare_tokens=5, spare_rows=2, decode_only=True), "xla")


@pytest.mark.parametrize(
    ("operation", "page_rows"),
    [
        (mamba1(2048, 4), 24),
        (mamba2(4, 64, 32, 2), 16),
        (delta(1, 2, 16, 128), 8),
        (mamba2(6, 64, 16, 2), 8),
    ],
    ids=["mamba1", "mamba2", "delta", "heads of two groups in a block"],
)
def test_decodes_within_the_pool(operation, page_rows):
    """States of whole tiles: from zeros, in place, to other blocks, to checkpoints."""
    sequences = [
        Sequence(before=5, new=1, in_place=False),
        Sequence(before=0, new=1, starts_from_zeros=True, checkpoints=(1,)),
        Sequence(before=3, new=1),
        Sequence(before=15, new=1, in_place=False, checkpoints=(16,)),
    ]
    layout = {"part": 0, "layer_slots": 3, "page_rows": page_rows, "spare_rows": 1, "spare_tokens": 2}
    check(make_step(operation, sequences, decode_only=True, **layout), "xla")


def test_keys_that_hardly_differ():
    """The hardest system of equations: all off-diagonal entries near one."""
    check(make_step(delta(1, 1, 16, 8, alike=True), [Sequence(before=0, new=130)]), "xla")


@pytest.mark.parametrize("name", ["mamba2", "delta"])
def test_strong_decays_before_weak_ones(name):
    """Running sums of 1,200 are exact to 0.0001 only, and so would be weak decays as their differences."""
    operation = with_strong_decays(OPERATIONS[name])
    check(make_step(operation, [Sequence(before=3, new=50, checkpoints=(35,))]), "xla")


@pytest.mark.parametrize("size", [1, 7, 8, 20, 64])
def test_inverses_of_triangles(size):
    """All ones below the diagonal: the inverse has -1 right below it and nothing else."""
    lower = np.tril(np.ones((size, size), np.float32), -1)
    [inverse] = unit_lower_inverse([jnp.asarray(lower)])
    np.testing.assert_allclose(inverse, np.eye(size) - np.eye(size, k=-1), atol=1e-6)


@pytest.mark.parametrize("size", [1, 7, 8, 20, 64])
def test_triangular_systems(size):
    """All ones below the diagonal and running sums on the right: ones solve it."""
    lower = jnp.tril(jnp.ones((2, size, size)), -1)
    right = np.repeat(np.arange(1, size + 1)[:, None], 3, axis=1) * np.array([1, -2, 0.5])
    found = solve_unit_lower(lower, jnp.asarray(np.stack([right, 2 * right])))
    np.testing.assert_allclose(found[1], np.tile([2, -4, 1], (size, 1)), rtol=1e-6)


def test_exponentials_of_decays():
    """Over all sizes that float32 has, and most exact where a decay is nearly one."""
    x = -np.concatenate([np.geomspace(1e-7, 126, 2000), np.arange(0, 126.5, 0.5)]).astype(np.float32)
    wanted = np.exp2(x.astype(np.float64))
    error = np.abs(np.asarray(exp2_of_negative(jnp.asarray(x)), np.float64) / wanted - 1)
    assert error.max() < 2.5e-7
    assert error[x > -0.01].max() < 1e-7
    assert float(exp2_of_negative(jnp.float32(-1e9))) <= 2.0**-126


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_step_of_padding_only_changes_nothing(name):
    step = make_step(OPERATIONS[name], [], spare_tokens=4, spare_rows=2)
    check(step, "xla")


@pytest.mark.parametrize("implementation", ["xla", "numba"])
def test_inputs_in_float16(implementation):
    operation = mamba1(48, 4)

    def tokens(rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
        plain = operation.tokens(rng, n)
        return plain | {"x": plain["x"].astype(np.float16)}

    step = make_step(replace(operation, tokens=tokens), EVERY_LENGTH[:4], spare_tokens=3)
    check(step, implementation, rtol=2.0**-10)  # outputs are rounded to float16
