"""Experts against a loop over tokens in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.grouped_matmul import grouped_matmul
from models.moe import Experts, Routing, _by_groups, _by_tiles, _gated, route

NUM_EXPERTS, HIDDEN, INNER, CHOSEN = 6, 16, 12, 2


@pytest.fixture(scope="module")
def experts() -> Experts:
    layer = Experts(NUM_EXPERTS, HIDDEN, INNER, jnp.dtype("float32"))
    rng = np.random.default_rng(0)
    layer.gate_up[...] = jnp.asarray(rng.standard_normal(layer.gate_up.shape), jnp.float32)
    layer.down[...] = jnp.asarray(rng.standard_normal(layer.down.shape), jnp.float32)
    return layer


def expected(layer: Experts, x: np.ndarray, routing: Routing) -> np.ndarray:
    gate_up, down = (np.asarray(w[...], np.float64) for w in (layer.gate_up, layer.down))
    out = np.zeros(x.shape)
    for token, (chosen, weights) in enumerate(
        zip(np.asarray(routing.experts), np.asarray(routing.weights), strict=True)
    ):
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up = np.split(gate_up[expert] @ x[token].astype(np.float64), 2)
            out[token] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def drawn(num_tokens: int, experts: int = NUM_EXPERTS) -> tuple[np.ndarray, Routing]:
    rng = np.random.default_rng(num_tokens)
    x = rng.standard_normal((num_tokens, HIDDEN)).astype(np.float32)
    logits = np.full((num_tokens, NUM_EXPERTS), -100.0, np.float32)
    logits[:, :experts] = rng.standard_normal((num_tokens, experts))
    return x, route(jnp.asarray(logits), CHOSEN, renormalise=True)


@pytest.mark.parametrize("num_tokens", [1, 3, 40, 200])
def test_every_token_gets_its_experts(experts, num_tokens):
    x, routing = drawn(num_tokens)
    out = jax.jit(experts)(jnp.asarray(x), routing, jnp.int32(num_tokens))
    np.testing.assert_allclose(out, expected(experts, x, routing), rtol=2e-5, atol=2e-4)


def test_padding_tokens_get_zeros_and_change_nothing(experts):
    x, routing = drawn(40)
    x[17:] = np.nan
    out = jax.jit(experts)(jnp.asarray(x), routing, jnp.int32(17))
    kept = Routing(routing.experts[:17], routing.weights[:17])
    np.testing.assert_allclose(out[:17], expected(experts, x[:17], kept), rtol=2e-5, atol=2e-4)
    assert not np.asarray(out[17:]).any()


def test_experts_that_nobody_chose_are_not_computed(experts):
    """A product with their weights would bring their NaN in."""
    x, routing = drawn(40, experts=3)
    spoilt = Experts(NUM_EXPERTS, HIDDEN, INNER, jnp.dtype("float32"))
    spoilt.gate_up[...] = experts.gate_up[...].at[3:].set(jnp.nan)
    spoilt.down[...] = experts.down[...].at[3:].set(jnp.nan)
    out = jax.jit(spoilt)(jnp.asarray(x), routing, jnp.int32(40))
    np.testing.assert_allclose(out, expected(experts, x, routing), rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("form", [_by_groups, partial(_gated, partial(grouped_matmul, interpret=True))])
def test_tiles_equal_the_grouped_matmuls_of_accelerators(experts, form):
    counts = jnp.asarray([0, 5, 1, 33, 0, 8])
    rows = jnp.asarray(np.random.default_rng(1).standard_normal((60, HIDDEN)), jnp.float32)
    tiles, groups = (
        np.asarray(each(rows, counts, experts.gate_up[...], experts.down[...]))[:47]
        for each in (_by_tiles, form)
    )
    np.testing.assert_allclose(tiles, groups, rtol=2e-5, atol=2e-4)


def test_weights_are_softmax_over_all_experts_unless_renormalised():
    logits = jnp.log(jnp.asarray([[1.0, 2.0, 5.0, 2.5]])) + 3.0
    plain = route(logits, 2, renormalise=False)
    assert plain.experts.tolist() == [[2, 3]]
    np.testing.assert_allclose(plain.weights, [[5 / 10.5, 2.5 / 10.5]], rtol=1e-6)
    np.testing.assert_allclose(route(logits, 2, renormalise=True).weights, [[5 / 7.5, 2.5 / 7.5]], rtol=1e-6)
