import numpy as np

from jaxkv.engine.engine import Prompt
from jaxkv.engine.sampling_params import SamplingParams
from tests.engine.serving import answers, run_to_end

PROMPTS = [list(range(30 + i, 40 + 2 * i)) for i in range(4)]


def sampled(seed, **kwargs):
    return SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, seed=seed, **kwargs)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(bench):
    params = [sampled(5), sampled(6, top_k=20), sampled(7, top_p=0.8), sampled(8, top_k=50, top_p=0.9)]
    engine = bench.engine()
    ids = [
        engine.add_request(Prompt(token_ids=prompt), prompt_params)
        for prompt, prompt_params in zip(PROMPTS, params, strict=True)
    ]
    together = run_to_end(engine)
    for request_id, prompt, prompt_params in zip(ids, PROMPTS, params, strict=True):
        [alone] = answers(bench.engine(tokens_a_step=5), [prompt], prompt_params)
        assert together[request_id].token_ids == alone.token_ids


def test_different_seeds_give_different_tokens(bench):
    first, second = (answers(bench.engine(), PROMPTS[:1], sampled(seed))[0] for seed in (1, 2))
    assert first.token_ids != second.token_ids


def test_requests_without_a_seed_differ_but_the_engines_seed_repeats_them(bench):
    runs = [answers(bench.engine(seed=3), [PROMPTS[0]] * 2, sampled(None)) for _ in range(2)]
    assert runs[0][0].token_ids != runs[0][1].token_ids
    assert [o.token_ids for o in runs[0]] == [o.token_ids for o in runs[1]]
    other = answers(bench.engine(seed=4), [PROMPTS[0]], sampled(None))
    assert other[0].token_ids != runs[0][0].token_ids


def test_top_k_of_one_is_greedy(bench):
    greedy = answers(bench.engine(), PROMPTS, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    single = answers(bench.engine(), PROMPTS, sampled(0, top_k=1))
    assert [o.token_ids for o in greedy] == [o.token_ids for o in single]


def test_logprobs_are_given_to_those_that_ask_and_agree_with_greedy_choice(bench):
    engine = bench.engine()
    asks = engine.add_request(
        Prompt(token_ids=PROMPTS[0]), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    )
    bare = engine.add_request(
        Prompt(token_ids=PROMPTS[1]), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    )
    outputs = run_to_end(engine)
    assert outputs[bare].logprobs is None
    logprobs = outputs[asks].logprobs
    assert logprobs is not None
    assert len(logprobs) == 6
    for token, entry in zip(outputs[asks].token_ids, logprobs, strict=True):
        values = list(entry.top.values())
        assert next(iter(entry.top)) == token
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0]
        assert np.exp(values).sum() <= 1
