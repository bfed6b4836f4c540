"""Keys and values of 8 bits: every token is quantised on its own, so tokens depend on nothing else either."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import LLM, JaxkvError
from jaxkv.engine.buckets import make_buckets
from jaxkv.engine.engine import Prompt
from jaxkv.engine.poison import NAN_WORD, PoisoningRunner
from jaxkv.engine.sampling_params import SamplingParams
from jaxkv.planning import PlanConfig, make_plan
from tests.engine.serving import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    MAX_TOKENS_A_STEP,
    Bench,
    answers,
    run_to_end,
)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def quantised(tiny) -> Bench:
    """A bench over a cache in int8; its pool begins as NaN, in words and so in scales."""
    config = PlanConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_TOKENS_A_STEP,
        max_num_seqs=MAX_NUM_SEQS,
        num_gpu_blocks_override=200,
        policy="unified",
    )
    specs = tiny.cache_specs(BLOCK_SIZE, kv_cache_dtype="int8")
    buckets = make_buckets(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_TOKENS_A_STEP,
        decode_seqs=(MAX_NUM_SEQS,),
        prefill_tokens=(MAX_TOKENS_A_STEP,),
    )
    runner = PoisoningRunner(
        tiny.model, make_plan(specs, config, 2**30), buckets=buckets, max_num_seqs=MAX_NUM_SEQS
    )
    runner.compile()
    runner.pages = jnp.full_like(runner.pages, NAN_WORD)
    return Bench(tiny, runner, buckets)


def test_greedy_tokens_are_the_same_however_requests_are_served(quantised: Bench) -> None:
    rng = np.random.default_rng(0)
    stem = rng.integers(6, 262, 30).tolist()
    prompts = [
        stem[:cut] + rng.integers(6, 262, more).tolist()
        for cut, more in [(30, 0), (30, 5), (17, 3), (29, 20)]
    ]
    alone = [
        answers(quantised.engine(caching=False), [prompt], greedy(12))[0].token_ids for prompt in prompts
    ]
    served: tuple[dict[str, Any], ...] = (
        {},
        {"tokens_a_step": 7},
        {"max_num_seqs": 2},
        {"caching": False, "tokens_a_step": 5},
    )
    for options in served:
        engine = quantised.engine(**options)
        first, again = (answers(engine, prompts, greedy(12)) for _ in range(2))
        assert [output.token_ids for output in first] == alone, options
        assert [output.token_ids for output in again] == alone, options
        assert (again[0].num_cached_tokens > 0) == options.get("caching", True)


def test_a_small_pool_preempts_and_still_gives_the_same_tokens(quantised: Bench) -> None:
    prompts = [[10 * i + j for j in range(1, 5)] for i in range(1, 5)]
    alone = [
        answers(quantised.engine(caching=False), [prompt], greedy(50))[0].token_ids for prompt in prompts
    ]
    engine = quantised.engine(num_blocks=47)
    ids = [engine.add_request(Prompt(token_ids=prompt), greedy(50)) for prompt in prompts]
    outputs = run_to_end(engine)
    assert sum(output.metrics.num_preemptions for output in outputs.values()) > 0
    assert [outputs[request_id].token_ids for request_id in ids] == alone


def test_tokens_are_mostly_those_of_a_float32_cache(quantised: Bench, bench: Bench) -> None:
    """First tokens: after those, answers that have parted stay apart."""
    prompts = np.random.default_rng(1).integers(6, 262, (24, 40)).tolist()
    exact = answers(bench.engine(), prompts, greedy(1))
    near = answers(quantised.engine(), prompts, greedy(1))
    same = sum(a.token_ids == b.token_ids for a, b in zip(exact, near, strict=True))
    assert same >= 20


@pytest.mark.parametrize(
    ("junk", "named"), [("int4", "'int4'"), (None, "None"), (np.array(["fp8", "int8"]), "array")]
)
def test_a_dtype_that_no_cache_has_is_refused_before_the_model_is_read(junk: Any, named: str) -> None:
    with pytest.raises(JaxkvError, match=rf"kv_cache_dtype must be one of auto, bfloat16, .* not {named}"):
        LLM("nowhere", kv_cache_dtype=junk)
