"""Weights in huge pages are the same weights."""

import mmap

import jax.numpy as jnp
import numpy as np
import pytest

from models.huge_pages import in_huge_pages

HUGE_PAGE = 2**21


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_stay_and_begin_where_a_huge_page_may(dtype):
    array = jnp.asarray(np.random.default_rng(0).normal(size=(1100, 1000)), dtype)
    moved = in_huge_pages(array)
    assert moved.dtype == array.dtype
    np.testing.assert_array_equal(moved, array)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        assert moved.unsafe_buffer_pointer() % HUGE_PAGE == 0
    assert in_huge_pages(moved) is moved


def test_an_array_smaller_than_a_huge_page_stays_where_it_is():
    array = jnp.zeros((1000, 100))
    assert in_huge_pages(array) is array


def test_a_system_without_huge_pages_is_no_reason_to_fail(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    array = jnp.zeros((1100, 1000))
    assert in_huge_pages(array) is array
