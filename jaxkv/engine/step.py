"""The jitted step: tokens in, next tokens out, the pool of pages updated in place.

One function for every bucket, compiled ahead for each (`CompiledSteps`). Nothing else runs on the device
while serving.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.engine.buckets import Bucket
from jaxkv.engine.sampler import Logprobs, gather_logprobs, sample
from jaxkv.engine.sampling_params import MAX_LOGPROBS
from jaxkv.engine.step_inputs import StepInputs, StepShape
from jaxkv.errors import JaxkvError
from models.paged_cache import CacheLayout, PagedCache

Weights = tuple[jax.Array, ...]


class StepOutputs(NamedTuple):
    """What a step returns, still on the device.

    pages: the pool, in the memory of the pool that was given. tokens int32[max_num_seqs]: the chosen tokens,
    in the order of `StepInputs.sampled`, zeros after them. logprobs: rows in the same order, zeros unless
    wanted.
    """

    pages: jax.Array
    tokens: jax.Array
    logprobs: Logprobs


@dataclass(frozen=True)
class StepFunction:
    """The step of one model over one pool.

    graph, weights_tree: the model without its weights, and how a flat tuple of them makes its state: a flat
    tuple is passed to a compiled function several times faster. cache_layout: where layers find their pages.
    max_num_seqs: rows of every step's result, so that each step can take the tokens of the one before,
    whatever their buckets.
    """

    graph: nnx.GraphDef
    weights_tree: Any
    cache_layout: CacheLayout
    max_num_seqs: int

    def step(
        self, weights: Weights, pages: jax.Array, previous: jax.Array, words: jax.Array, *, shape: StepShape
    ) -> StepOutputs:
        """weights: the leaves of the model's state. pages: the pool, donated. previous int32[max_num_seqs]:
        tokens that the step before chose. words: a packed `StepInputs` of `shape`.
        """
        model = nnx.merge(self.graph, jax.tree.unflatten(self.weights_tree, weights))
        inputs = shape.unpack(words)
        tokens = jnp.where(inputs.carried >= 0, previous[jnp.maximum(inputs.carried, 0)], inputs.tokens)
        cache = PagedCache(pages=pages, batch=inputs.batch, tables=inputs.tables, layout=self.cache_layout)
        hidden, cache = model(tokens, inputs.batch.positions, cache)
        chosen, logprobs = self._choose(model, hidden, inputs, shape.bucket)
        return StepOutputs(cache.pages, chosen, logprobs)

    def _choose(
        self, model: Any, hidden: jax.Array, inputs: StepInputs, bucket: Bucket
    ) -> tuple[jax.Array, Logprobs]:
        """Next tokens after the sampled positions, padded to max_num_seqs rows, and their logprobs."""
        logits = self._logits(model, hidden, inputs, bucket)
        chosen = sample(logits, inputs.sampling)
        padding = self.max_num_seqs - bucket.num_seqs

        def wanted(logits: jax.Array, chosen: jax.Array) -> Logprobs:
            return gather_logprobs(logits, chosen, MAX_LOGPROBS)

        def nothing(logits: jax.Array, chosen: jax.Array) -> Logprobs:
            rows, top = chosen.shape[0], min(MAX_LOGPROBS, logits.shape[1])
            return Logprobs(jnp.zeros(rows), jnp.zeros((rows, top)), jnp.zeros((rows, top), jnp.int32))

        logprobs = jax.lax.cond(inputs.wants_logprobs > 0, wanted, nothing, logits, chosen)
        return jnp.pad(chosen, (0, padding)), logprobs

    def _logits(self, model: Any, hidden: jax.Array, inputs: StepInputs, bucket: Bucket) -> jax.Array:
        """float32[S, V] at the sampled positions. Those of a large vocabulary are a good part of a step: a
        step with prefill chunks computes none, one, or all rows, as it needs; rows that are not computed are
        zeros.
        """
        if bucket.decode_only:
            return model.logits(hidden[inputs.sampled])
        shape = jax.eval_shape(model.logits, hidden[inputs.sampled])

        def first(count: int, hidden: jax.Array, sampled: jax.Array) -> jax.Array:
            if count == 0:
                return jnp.zeros(shape.shape, shape.dtype)
            logits = model.logits(hidden[sampled[:count]])
            return jnp.pad(logits, ((0, bucket.num_seqs - count), (0, 0)))

        counts = tuple(dict.fromkeys((0, 1, bucket.num_seqs)))
        branch = jnp.minimum(inputs.num_samples, len(counts) - 1)
        return jax.lax.switch(branch, [partial(first, count) for count in counts], hidden, inputs.sampled)


class CompiledSteps:
    """The step compiled for every bucket. Calling one never compiles; a bucket that was not compiled is
    refused.
    """

    def __init__(self, function: StepFunction, shapes: Sequence[StepShape]) -> None:
        self.function = function
        self.shapes: Mapping[Bucket, StepShape] = {shape.bucket: shape for shape in shapes}
        self._compiled: dict[Bucket, Callable[..., StepOutputs]] = {}

    def compile(
        self, weights: Weights, pages: jax.Array, on_done: Callable[[Bucket], None] = lambda bucket: None
    ) -> None:
        """Compiles every bucket, as many at once as there are cores; `on_done` is called after each. Runs
        nothing.

        An exception (Ctrl-C) is raised at once; what is being compiled goes on unseen until it is done.
        """
        jitted = jax.jit(self.function.step, static_argnames="shape", donate_argnums=1)
        previous = jax.ShapeDtypeStruct((self.function.max_num_seqs,), jnp.int32)
        workers = ThreadPoolExecutor(os.cpu_count(), "compile")
        try:
            buckets: dict[Future[Callable[..., StepOutputs]], Bucket] = {}
            for bucket, shape in self.shapes.items():
                words = jax.ShapeDtypeStruct((shape.num_words,), jnp.int32)
                lowered = jitted.lower(weights, pages, previous, words, shape=shape)
                buckets[workers.submit(lowered.compile)] = bucket
            for done in as_completed(buckets):
                self._compiled[buckets[done]] = done.result()
                on_done(buckets[done])
        finally:
            workers.shutdown(wait=False, cancel_futures=True)

    def run(
        self, bucket: Bucket, weights: Weights, pages: jax.Array, previous: jax.Array, words: Any
    ) -> StepOutputs:
        """Starts one step and returns at once with arrays that may not be computed yet. `pages` must not be
        used again. JaxkvError where the bucket was not compiled.
        """
        compiled = self._compiled.get(bucket)
        if compiled is None:
            raise JaxkvError(f"the step of {bucket} is not compiled; warm_up() compiles all steps")
        return compiled(weights, pages, previous, words)
