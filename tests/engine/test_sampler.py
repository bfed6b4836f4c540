"""The sampler against its definition, written plainly in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine import sampler
from jaxkv.engine.draws import uniform_draws
from jaxkv.engine.sampler import SamplingRows

sample = jax.jit(sampler.sample)


def rows(n, *, temperature=1.0, top_k=0, top_p=1.0, seed=0):
    return SamplingRows(
        temperature=jnp.broadcast_to(jnp.float32(temperature), n),
        top_k=jnp.broadcast_to(jnp.int32(top_k), n),
        top_p=jnp.broadcast_to(jnp.float32(top_p), n),
        uniform=jnp.asarray(uniform_draws(np.full(n, seed, np.uint32), np.arange(n, dtype=np.int32))),
        num_banned=jnp.zeros(n, jnp.int32),
        banned=jnp.zeros((n, 3), jnp.int32),
    )


def kept_by_definition(logits, temperature, top_k, top_p):
    """bool[V]: sort, keep the k best (and ties), renormalise, keep the fewest that reach p (and ties)."""
    scaled = np.asarray(logits, np.float64) / temperature
    ordered = np.sort(scaled)[::-1]
    threshold = ordered[top_k - 1] if top_k else -np.inf
    kept = np.where(scaled >= threshold, np.exp(scaled - ordered[0]), 0)
    if top_p < 1:
        running = np.cumsum(np.sort(kept)[::-1]) / kept.sum()
        threshold = max(threshold, ordered[np.argmax(running >= top_p)])
    return scaled >= threshold


def test_greedy_takes_the_lowest_of_the_most_likely_ids():
    logits = np.random.default_rng(0).normal(size=(4, 1300)).astype(np.float32)
    logits[1, [3, 700, 1299]] = 9.0
    logits[2, 1299] = 9.0
    logits[3] = -np.inf
    logits[3, 513] = -5.0
    assert np.array_equal(sample(jnp.asarray(logits), rows(4, temperature=0.0)), np.argmax(logits, axis=-1))


@pytest.mark.parametrize("vocabulary", [7, 512, 1300])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.7, 0, 1.0), (1.0, 5, 1.0), (1.3, 0, 0.6), (2.0, 300, 0.97), (5.0, 0, 0.999)],
)
def test_only_tokens_that_the_filters_keep_are_drawn_and_all_of_them(vocabulary, temperature, top_k, top_p):
    logits = np.random.default_rng(vocabulary).normal(size=vocabulary).astype(np.float32) * 2
    n = 4096
    drawn = np.asarray(
        sample(
            jnp.broadcast_to(jnp.asarray(logits), (n, vocabulary)),
            rows(n, temperature=temperature, top_k=min(top_k, vocabulary), top_p=top_p),
        )
    )
    kept = kept_by_definition(logits, temperature, min(top_k, vocabulary), top_p)
    assert kept[drawn].all()
    weights = np.where(kept, np.exp(np.float64(logits) / temperature), 0)
    expected = n * weights / weights.sum()
    counts = np.bincount(drawn, minlength=vocabulary)
    # Pearson's statistic over tokens expected often enough; its mean is their number and its variance twice
    # that.
    often = expected >= 5
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    assert statistic < often.sum() + 5 * np.sqrt(2 * often.sum())


def test_filters_that_many_tokens_pass_are_found_by_bisection():
    """More tokens pass than the few candidates that the fast way looks at."""
    logits = np.random.default_rng(1).normal(size=(2, 3000)).astype(np.float32)
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    top_k, top_p = jnp.array([900, 3000]), jnp.array([1.0, 0.8])
    kept = np.isfinite(sampler._keep_likely(jnp.asarray(logits), top_k, top_p))
    assert np.array_equal(kept, sampler._likely_by_bisection(jnp.asarray(logits), weights, top_k, top_p))
    assert np.array_equal(kept[0], kept_by_definition(logits[0], 1, 900, 1.0))
    assert np.array_equal(kept[1], kept_by_definition(logits[1], 1, 0, 0.8))


def test_tokens_that_tie_with_the_last_kept_one_are_kept():
    logits = jnp.array([[3.0, 1.0, 1.0, 1.0, 0.0]])
    kept = jnp.isfinite(sampler._keep_likely(logits, jnp.array([2]), jnp.array([1.0])))
    assert kept.tolist() == [[True, True, True, True, False]]


def test_a_row_is_the_same_alone_and_in_any_batch():
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(size=(6, 2000)).astype(np.float32))
    batch = SamplingRows(
        temperature=jnp.array([0.0, 1.0, 1.0, 0.5, 2.0, 0.0], jnp.float32),
        top_k=jnp.array([0, 0, 40, 0, 1000, 3], jnp.int32),
        top_p=jnp.array([1.0, 1.0, 1.0, 0.9, 0.99, 0.5], jnp.float32),
        uniform=jnp.array([0.1, 0.0, 0.999999, 0.4, 0.5, 0.6], jnp.float32),
        num_banned=jnp.array([0, 1, 0, 2, 0, 1], jnp.int32),
        banned=jnp.argsort(-logits)[:, :2].astype(jnp.int32),
    )
    together = sample(logits, batch)
    for i in range(6):
        alone = sample(logits[i : i + 1], SamplingRows(*(field[i : i + 1] for field in batch)))
        assert alone[0] == together[i]


@pytest.mark.parametrize("vocabulary", [5, 512, 1025])
def test_the_ends_of_the_unit_interval_draw_the_first_and_the_last_token_of_any_weight(vocabulary):
    logits = np.zeros((2, vocabulary), np.float32)
    logits[:, :2] = logits[:, -2:] = -np.inf
    largest = np.nextafter(np.float32(1), np.float32(0))
    drawn = sample(jnp.asarray(logits), rows(2)._replace(uniform=jnp.array([0.0, largest])))
    assert drawn.tolist() == [2, vocabulary - 3]


def test_logprobs_are_those_of_the_raw_logits():
    logits = np.random.default_rng(3).normal(size=(3, 700)).astype(np.float32)
    expected = np.float64(logits) - np.log(np.exp(np.float64(logits)).sum(axis=-1, keepdims=True))
    result = sampler.gather_logprobs(jnp.asarray(logits), jnp.array([0, 5, 699]), 4)
    order = np.argsort(-logits, axis=-1)[:, :4]
    np.testing.assert_allclose(result.chosen, expected[[0, 1, 2], [0, 5, 699]], atol=1e-5)
    np.testing.assert_array_equal(result.top_ids, order)
    np.testing.assert_allclose(result.top, np.take_along_axis(expected, order, axis=-1), atol=1e-5)


def test_the_best_token_that_is_not_banned_is_chosen():
    logits = np.random.default_rng(3).normal(size=(5, 700)).astype(np.float32)
    best = np.argsort(-logits)
    banned = best[:, [1, 0, 2]].astype(np.int32)
    banned[4] = [best[4, 0], 700, 2**31 - 1]  # two are past the vocabulary
    given = rows(5, temperature=0.0)._replace(num_banned=jnp.array([0, 1, 2, 3, 3]), banned=jnp.array(banned))
    expected = [best[0, 0], best[1, 0], best[2, 2], best[3, 3], best[4, 1]]
    assert sample(jnp.asarray(logits), given).tolist() == expected


def test_all_tokens_but_the_banned_ones_are_drawn():
    n, banned = 512, [0, 4]
    given = rows(n)._replace(
        num_banned=jnp.full(n, 2), banned=jnp.broadcast_to(jnp.array([*banned, 1], jnp.int32), (n, 3))
    )
    drawn = sample(jnp.zeros((n, 7)), given)
    assert set(drawn.tolist()) == set(range(7)) - set(banned)
