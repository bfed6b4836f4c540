"""Chooses one token a row from float32 logits, without ever sorting the vocabulary.

Top-k and top-p keep the logits above a threshold. The few best tokens decide it almost always; where they do
not, bisection over the bits of a float32 finds it in 32 passes. On a vocabulary of 262,144 a sort takes ten
times longer than the bisection. A draw takes one uniform number a row, which the host supplies (`draws`), by
inverse transform over a sum of two levels. No row's token depends on what else is in the batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_CHUNK = 512
_CANDIDATES = 256
_HIGHEST_BIT = np.uint32(0x8000_0000)


class SamplingRows(NamedTuple):
    """Per row of logits [N, V], all [N]: temperature float32 (0: greedy), top_k int32 (0: all), top_p float32
    (1: all), uniform float32 in [0, 1): the random number to draw with.

    banned int32[N, B]: token ids that are never chosen, of which the first num_banned int32[N] count. Ids
    past the vocabulary ban nothing.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    uniform: jax.Array
    num_banned: jax.Array
    banned: jax.Array


class Logprobs(NamedTuple):
    """Natural log probabilities of raw logits: chosen float32[N], and the best: top float32[N, K], top_ids
    int32[N, K].
    """

    chosen: jax.Array
    top: jax.Array
    top_ids: jax.Array


def sample(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Token ids int32[N] for logits float32[N, V]. Work that no row asks for is not done."""
    plain = jnp.all((rows.temperature <= 0) & (rows.num_banned == 0))
    return jax.lax.cond(plain, _greedy_only, _sample_mixed, logits, rows)


def gather_logprobs(logits: jax.Array, token_ids: jax.Array, num_top: int) -> Logprobs:
    """Log probabilities of `token_ids` int32[N] and of the `num_top` best under logits float32[N, V]."""
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1) - normaliser
    top, top_ids = jax.lax.top_k(logits, min(num_top, logits.shape[-1]))
    return Logprobs(chosen[:, 0], top - normaliser, top_ids.astype(jnp.int32))


def greedy(logits: jax.Array) -> jax.Array:
    """The lowest of the most likely token ids, int32[N], for logits float32[N, V]. In two levels, since XLA's
    argmax is not vectorised on CPU.
    """
    chunks = _in_chunks(logits, -jnp.inf)
    best_chunk = jnp.argmax(jnp.max(chunks, axis=-1), axis=-1)
    inside = _chunk_of(chunks, best_chunk)
    return (best_chunk * _CHUNK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def _greedy_only(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    del rows
    return greedy(logits)


def _sample_mixed(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    logits = _without_banned(logits, rows)
    is_greedy = rows.temperature <= 0
    scaled = logits / jnp.where(is_greedy, 1.0, rows.temperature)[:, None]
    vocabulary = logits.shape[-1]
    top_k = jnp.where((rows.top_k <= 0) | is_greedy, vocabulary, jnp.minimum(rows.top_k, vocabulary))
    top_p = jnp.where(is_greedy, 1.0, rows.top_p)
    filters = jnp.any((top_k < vocabulary) | (top_p < 1))
    scaled = jax.lax.cond(filters, _keep_likely, lambda x, *_: x, scaled, top_k, top_p)
    return jnp.where(is_greedy, greedy(logits), _draw(scaled, rows.uniform))


def _without_banned(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Logits float32[N, V] with -inf at the banned tokens."""
    counts = jnp.arange(rows.banned.shape[1]) < rows.num_banned[:, None]
    tokens = jnp.where(counts, rows.banned, logits.shape[1])
    return logits.at[jnp.arange(logits.shape[0])[:, None], tokens].set(-jnp.inf, mode="drop")


def _keep_likely(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Logits with -inf below each row's threshold: found among the few best where they decide it, else by
    bisection. Which of the two serves a row depends on that row alone.
    """
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    # The barrier keeps XLA from merging later slices into top_k, which makes it a sort of the whole
    # vocabulary.
    best, _ = jax.lax.optimization_barrier(jax.lax.top_k(logits, min(_CANDIDATES, logits.shape[-1])))
    last_of_k = jnp.take_along_axis(best, jnp.minimum(top_k, best.shape[-1])[:, None] - 1, axis=-1)
    decided_k = (top_k <= best.shape[-1]) | (top_k == logits.shape[-1])
    threshold = jnp.where((top_k <= best.shape[-1])[:, None], last_of_k, -jnp.inf)
    wanted = top_p[:, None] * jnp.sum(jnp.where(logits >= threshold, weights, 0), axis=-1, keepdims=True)
    reached = jnp.cumsum(jnp.exp(best - best[:, :1]), axis=-1) >= wanted
    last_of_p = jnp.take_along_axis(best, jnp.argmax(reached, axis=-1)[:, None], axis=-1)
    threshold = jnp.where((top_p < 1)[:, None], jnp.maximum(threshold, last_of_p), threshold)
    decided = (decided_k & ((top_p >= 1) | jnp.any(reached, axis=-1)))[:, None]
    keep = jax.lax.cond(
        jnp.all(decided),
        lambda *_: logits >= threshold,
        lambda *args: jnp.where(decided, logits >= threshold, _likely_by_bisection(*args)),
        *(logits, weights, top_k, top_p),
    )
    return jnp.where(keep, logits, -jnp.inf)


def _likely_by_bisection(
    logits: jax.Array, weights: jax.Array, top_k: jax.Array, top_p: jax.Array
) -> jax.Array:
    """bool[N, V]: the tokens that top-k and then top-p keep."""
    keys = _sortable(logits)
    threshold = _bisect(lambda t: jnp.sum(keys >= t[:, None], axis=-1) >= top_k, logits.shape[0])
    weights = jnp.where(keys >= threshold[:, None], weights, 0)
    wanted = top_p * jnp.sum(weights, axis=-1)
    by_mass = _bisect(
        lambda t: jnp.sum(jnp.where(keys >= t[:, None], weights, 0), axis=-1) >= wanted, logits.shape[0]
    )
    threshold = jnp.where(top_p < 1, jnp.maximum(threshold, by_mass), threshold)
    return keys >= threshold[:, None]


def _sortable(values: jax.Array) -> jax.Array:
    """uint32 keys in the same order as the float32 values: flip all bits of a negative, the sign of a
    positive.
    """
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >= _HIGHEST_BIT, ~bits, bits | _HIGHEST_BIT)


def _bisect(holds, num_rows: int) -> jax.Array:
    """The largest uint32[N] threshold for which `holds(threshold)` bool[N] is true; it must be true of 0 and,
    once false, stay false. One bit a pass, from the highest.
    """

    def set_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (_HIGHEST_BIT >> i.astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, threshold)

    return jax.lax.fori_loop(0, 32, set_bit, jnp.zeros(num_rows, jnp.uint32))


def _draw(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    """One draw a row from softmax(logits): the first id at which the running sum passes u * total."""
    chunks = _in_chunks(jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), 0)
    chunk_ends = jnp.cumsum(jnp.sum(chunks, axis=-1), axis=-1)
    target = uniform * chunk_ends[:, -1]
    chunk = _first_above(chunk_ends, target)
    before = jnp.take_along_axis(jnp.pad(chunk_ends, ((0, 0), (1, 0))), chunk[:, None], axis=1)[:, 0]
    inside = _chunk_of(chunks, chunk)
    offset = _first_above(jnp.cumsum(inside, axis=-1), target - before)
    # Rounding may leave the target above the last sum: then the last token of the chunk that has any weight.
    last = _CHUNK - 1 - jnp.argmax(inside[:, ::-1] > 0, axis=-1)
    return (chunk * _CHUNK + jnp.minimum(offset, last)).astype(jnp.int32)


def _first_above(sums: jax.Array, target: jax.Array) -> jax.Array:
    """The first index of ascending sums[N, C] above target[N]; the last where there is none."""
    return jnp.minimum(jnp.sum(sums <= target[:, None], axis=-1), sums.shape[-1] - 1)


def _in_chunks(values: jax.Array, fill: float) -> jax.Array:
    """values [N, V] as [N, ceil(V / 512), 512], the end filled."""
    padded = jnp.pad(values, ((0, 0), (0, -values.shape[-1] % _CHUNK)), constant_values=fill)
    return padded.reshape(values.shape[0], -1, _CHUNK)


def _chunk_of(chunks: jax.Array, index: jax.Array) -> jax.Array:
    """chunks[N, C, 512] and one index a row, int[N] -> [N, 512]."""
    return jnp.take_along_axis(chunks, index[:, None, None], axis=1)[:, 0]
