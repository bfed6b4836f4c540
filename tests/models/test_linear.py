"""Matrices give the same products and rows however they are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.linear import Matrix, VocabularyMatrix, arrange, linear, look_up, vocabulary_logits
from pallas_kernels.cpu import available
from pallas_kernels.panels import WIDTH

OUT, IN = 3 * WIDTH, 40


class Model(nnx.Module):
    def __init__(self, dtype: str = "float32", out: int = OUT):
        weights = np.random.default_rng(0).normal(size=(out, IN))
        self.matrix = Matrix(jnp.asarray(weights, dtype))
        self.other = nnx.Param(jnp.asarray(weights, dtype))


class Vocabulary(nnx.Module):
    def __init__(self):
        weights = np.random.default_rng(0).normal(size=(OUT, IN))
        self.matrix = VocabularyMatrix(jnp.asarray(weights, "bfloat16"))
        self.other = Matrix(jnp.asarray(weights, "bfloat16"))


@pytest.mark.parametrize("rows", [1, 8, 70])
def test_products_in_panels_equal_the_definition(rows):
    model = Model()
    plain = np.asarray(model.matrix[...], np.float64)
    arrange(model, "cpu")
    assert model.matrix[...].shape == (OUT // WIDTH, IN, WIDTH)
    x = np.random.default_rng(1).normal(size=(rows, IN)).astype(np.float32)
    for product in (linear, vocabulary_logits):
        out = jax.jit(product)(x, model.matrix[...])
        np.testing.assert_allclose(out, x.astype(np.float64) @ plain.T, rtol=1e-5, atol=1e-5)


def test_rows_in_panels_are_the_rows():
    model = Model()
    plain, rows = model.matrix[...], jnp.array([0, OUT - 1, WIDTH - 1, WIDTH, 0])
    arrange(model, "cpu")
    np.testing.assert_array_equal(look_up(model.matrix[...], rows), plain[rows])


def test_arranging_again_changes_nothing():
    model = Model()
    arrange(model, "cpu")
    once = model.matrix[...]
    arrange(model, "cpu")
    assert model.matrix[...] is once


@pytest.mark.parametrize(
    ("why_not", "multiplies", "arranged"),
    [("not installed", True, ()), (None, False, ("matrix",)), (None, True, ("matrix", "other"))],
    ids=["no numba", "no instruction for pairs", "with it"],
)
def test_bfloat16_lies_in_panels_where_that_gains(
    monkeypatch: pytest.MonkeyPatch, why_not: str | None, multiplies: bool, arranged: tuple[str, ...]
):
    vocabulary = Vocabulary()
    plain = np.asarray(vocabulary.matrix[...], np.float64)
    monkeypatch.setattr(available, "why_not", lambda: why_not)
    monkeypatch.setattr(available, "multiplies_bfloat16", lambda: multiplies)
    arrange(vocabulary, "cpu")
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, IN)), "bfloat16")
    rows = jnp.array([5, OUT - 1])
    for name in ("matrix", "other"):
        matrix = getattr(vocabulary, name)[...]
        assert matrix.shape == ((OUT // WIDTH, IN // 2, WIDTH, 2) if name in arranged else (OUT, IN))
        logits = jax.jit(vocabulary_logits)(x, matrix)
        expected = np.asarray(x, np.float64) @ plain.T
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
        hidden = jax.jit(linear)(x, matrix)
        assert hidden.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(hidden, np.float64), expected, rtol=2**-8, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(look_up(matrix, rows), np.float64), plain[np.asarray(rows)])


@pytest.mark.parametrize(
    ("model", "platform"),
    [(Model(), "tpu"), (Model("float16"), "cpu"), (Model(out=50), "cpu")],
    ids=["another platform", "float16", "rows that do not fill panels"],
)
def test_what_gains_nothing_stays_as_it_is(model, platform):
    before = nnx.state(model)
    arrange(model, platform)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), before, nnx.state(model)))


def test_other_parameters_are_left_alone():
    model = Model()
    before = model.other[...]
    arrange(model, "cpu")
    assert model.other[...] is before
