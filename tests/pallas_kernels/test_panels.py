"""Products with matrices in panels: both implementations, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import bfloat16_pairs, product
from pallas_kernels.cpu.kernel import Kernel
from pallas_kernels.panels import WIDTH, fits_panels, matrix_rows, multiply, to_panels
from pallas_kernels.xla.panels import MANY_ROWS, ROWS_AT_ONCE

OUT, IN = 5 * WIDTH, 42


def matrix(dtype: str, out: int = OUT, inputs: int = IN) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(out, inputs)), dtype)


def rows_of_x(rows: int, dtype: str, inputs: int = IN) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(rows, inputs)), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 29])
def test_numba_equals_the_definition(rows: int, dtype: str):
    x, weights = rows_of_x(rows, dtype), matrix(dtype)
    product = jax.jit(lambda x, w: multiply(x, w, "numba"))(x, to_panels(weights))
    assert product.dtype == jnp.float32
    expected = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("features", "dtype"),
    [({"avx512f"}, "bfloat16"), (set(), "bfloat16"), (set(), "float32")],
    ids=["AVX-512 without bfloat16", "bfloat16 without either", "float32 without either"],
)
def test_other_processors_get_other_tiles(features: set[str], dtype: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bfloat16_pairs, "has", features.__contains__)
    monkeypatch.setattr(product, "_kernel", product._kernel.__wrapped__)
    monkeypatch.setattr(product, "Kernel", lambda name, *rest: Kernel(f"{name}_{len(features)}", *rest))
    weights = matrix(dtype)
    panels = to_panels(weights)
    x = rows_of_x(13, dtype)
    expected = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    together = np.asarray(product.multiply(x, panels))
    np.testing.assert_allclose(together, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 8, MANY_ROWS, ROWS_AT_ONCE, 2 * ROWS_AT_ONCE + 3])
def test_xla_equals_the_definition(rows: int, dtype: str):
    x, weights = rows_of_x(rows, dtype), matrix(dtype)
    product = jax.jit(lambda x, w: multiply(x, w, "xla"))(x, to_panels(weights))
    expected = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numba_gives_a_row_the_same_bits_beside_any_others(dtype: str):
    # 600 inputs and 40 panels: several pieces, and as many for one row as for many.
    weights = to_panels(matrix(dtype, 40 * WIDTH, 600))
    x = rows_of_x(23, dtype, 600)
    product = jax.jit(lambda x: multiply(x, weights, "numba"))
    together = np.asarray(product(x))
    for start, rows in ((0, 1), (1, 2), (3, 3), (6, 5), (11, 12)):
        np.testing.assert_array_equal(product(x[start : start + rows]), together[start : start + rows])


@pytest.mark.parametrize("implementation", ["numba", "xla"])
def test_pairs_can_meet_float32(implementation: str):
    x, weights = rows_of_x(3, "float32"), matrix("bfloat16")
    expected = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    panels = to_panels(weights)
    for given in (panels, panels.astype(jnp.float32)):
        np.testing.assert_allclose(multiply(x, given, implementation), expected, rtol=1e-5, atol=1e-5)


def test_numba_sums_inputs_one_after_another():
    # 2^24 + 1 rounds to 2^24, so the order shows: ones before the large number count, ones after it do not.
    weights = np.ones((WIDTH, 4), np.float32)
    for x, expected in (([1, 1, 2**24, 0], 2**24 + 2), ([2**24, 1, 1, 1], 2**24)):
        product = multiply(jnp.array([x], jnp.float32), to_panels(jnp.asarray(weights)), "numba")
        np.testing.assert_array_equal(product, np.full((1, WIDTH), expected))


def test_no_rows_are_no_products():
    assert multiply(rows_of_x(0, "float32"), to_panels(matrix("float32")), "numba").shape == (0, OUT)


def test_rows_of_panels_are_the_rows():
    weights = matrix("bfloat16")
    rows = jnp.array([0, OUT - 1, WIDTH - 1, WIDTH, 0])
    for dtype in ("float32", "bfloat16"):
        panels = to_panels(weights.astype(dtype))
        np.testing.assert_array_equal(matrix_rows(panels, rows), weights[rows])


def test_what_fits_panels():
    assert fits_panels(matrix("float32", inputs=41))
    assert fits_panels(matrix("bfloat16"))
    assert not fits_panels(matrix("bfloat16", inputs=41))  # not in pairs
    assert not fits_panels(matrix("float32", out=WIDTH + 1))
    assert not fits_panels(matrix("float16"))
    assert not fits_panels(to_panels(matrix("float32")))


def test_what_does_not_fit_is_refused():
    panels = to_panels(matrix("float32"))
    with pytest.raises(ValueError, match=r"x\[2, 7\] does not fit panels\[5, 42, 64\]"):
        multiply(jnp.zeros((2, 7)), panels)
    with pytest.raises(ValueError, match="weights are float16"):
        multiply(jnp.zeros((2, IN)), panels.astype("float16"), "numba")
    with pytest.raises(ValueError, match="panels hold 32 outputs, not 64"):
        multiply(jnp.zeros((2, IN)), panels[:, :, :32], "numba")
