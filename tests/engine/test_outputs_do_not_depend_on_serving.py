"""Greedy tokens are the model's, whatever is cached, batched, chunked, preempted or padded. All pages that
hold nothing are NaN throughout (see `PoisoningRunner`).
"""

from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxkv.engine.engine import Prompt
from jaxkv.engine.sampling_params import SamplingParams
from tests.engine.serving import MAX_NUM_SEQS, MAX_TOKENS_A_STEP, answers, run_to_end

SLOW_EXAMPLES = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@st.composite
def prompt_lists(draw):
    """Up to five prompts, most of which begin alike, so that hits of every length occur."""
    stems = draw(st.lists(st.lists(st.integers(6, 261), min_size=1, max_size=40), min_size=1, max_size=2))
    prompts = []
    for _ in range(draw(st.integers(1, 5))):
        stem = draw(st.sampled_from(stems))
        prompts.append(
            stem[: draw(st.integers(1, len(stem)))] + draw(st.lists(st.integers(6, 261), max_size=6))
        )
    return prompts


@pytest.fixture(scope="session")
def alone(bench):
    """The tokens of one prompt served by itself, in as few chunks as there can be, with nothing cached."""

    @cache
    def tokens(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        [output] = answers(bench.engine(caching=False), [prompt], greedy(max_tokens))
        return output.token_ids

    return tokens


@SLOW_EXAMPLES
@given(data=st.data())
def test_greedy_tokens_are_the_same_however_requests_are_served(bench, alone, data):
    prompts = data.draw(prompt_lists(), "prompts")
    max_tokens = data.draw(st.integers(1, 14), "max_tokens")
    max_num_seqs = data.draw(st.integers(1, MAX_NUM_SEQS), "max_num_seqs")
    overlap = data.draw(st.booleans(), "overlap")
    # The smallest pool that holds a request of the maximum length, with one or two steps in flight.
    smallest = 63 if overlap else 47
    engine = bench.engine(
        caching=data.draw(st.booleans(), "caching"),
        num_blocks=data.draw(st.sampled_from([smallest, smallest + 20, 199]), "num_blocks"),
        max_num_seqs=max_num_seqs,
        tokens_a_step=data.draw(st.integers(max_num_seqs, MAX_TOKENS_A_STEP), "tokens_a_step"),
        buckets=bench.buckets[data.draw(st.integers(0, len(bench.buckets) - 1), "smallest bucket") :],
        overlap=overlap,
    )
    outputs = {}
    ids = []
    for prompt in prompts:
        ids.append(engine.add_request(Prompt(token_ids=prompt), greedy(max_tokens)))
        for _ in range(data.draw(st.integers(0, 3), "steps before the next arrives")):
            outputs |= {d.request_id: d.output for d in engine.step() if d.output is not None}
            engine.cache_manager.check_integrity()
    outputs |= run_to_end(engine)
    assert [outputs[i].token_ids for i in ids] == [alone(tuple(prompt), max_tokens) for prompt in prompts]


@pytest.mark.parametrize("caching", [False, True])
def test_a_small_pool_preempts_and_still_gives_the_same_tokens(bench, alone, caching):
    prompts = [[10 * i + j for j in range(1, 5)] for i in range(1, 5)]
    engine = bench.engine(num_blocks=47, caching=caching)
    outputs = answers(engine, prompts, greedy(50))
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert [output.token_ids for output in outputs] == [alone(tuple(prompt), 50) for prompt in prompts]


def test_a_prompt_seen_before_is_not_computed_again(bench, alone):
    prompt = list(range(20, 61))
    engine = bench.engine()
    [first] = answers(engine, [prompt], greedy(8))
    scheduled = engine.metrics.num_scheduled_tokens
    [second] = answers(engine, [prompt], greedy(8))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 40)
    assert engine.metrics.num_scheduled_tokens - scheduled == scheduled - 40
    assert first.token_ids == second.token_ids == alone(tuple(prompt), 8)


def test_a_step_of_single_tokens_runs_with_chunks_where_one_of_them_reads_what_another_one_writes(
    bench, alone, monkeypatch
):
    """A step of decodes alone has no place for it: kernels may write what decodes read."""
    prompt = tuple(range(20, 27))
    [token, *_] = alone(prompt, 3)  # fills the second block of four, in the engine's second step
    follower = (*prompt, token, 50)
    expected = [alone(prompt, 3), alone(follower, 3)]
    buckets, run = [], bench.runner.steps.run
    monkeypatch.setattr(
        bench.runner.steps, "run", lambda bucket, *rest: buckets.append(bucket) or run(bucket, *rest)
    )
    engine = bench.engine()
    ids = [engine.add_request(Prompt(token_ids=prompt), greedy(3))]
    engine.step()
    ids.append(engine.add_request(Prompt(token_ids=follower), greedy(3)))
    outputs = run_to_end(engine)
    assert outputs[ids[1]].num_cached_tokens == 8
    assert [bucket.decode_only for bucket in buckets[:3]] == [False, False, True]
    assert [outputs[i].token_ids for i in ids] == expected
