"""`LLM` as a user has it."""

import numpy as np
import pytest

from jaxkv import LLM, JaxkvError, SamplingParams
from jaxkv.engine.runner import _allocate
from jaxkv.engine.sampling_params import SamplingParams as Params


@pytest.fixture(scope="module")
def llm(tiny):
    return LLM(
        tiny,
        memory="1MiB",
        block_size=4,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        decode_buckets=(),
        prefill_buckets=(),
    )


GREEDY = Params(temperature=0, max_tokens=5, ignore_eos=True)


def test_text_token_ids_and_lists_of_either_are_prompts(llm):
    ids = llm.loaded.tokenizer.encode("abc")
    [from_text] = llm.generate("abc", GREEDY)
    [from_ids] = llm.generate(ids, GREEDY)
    several = llm.generate(["abc", ids], [GREEDY, Params(temperature=0, max_tokens=2, ignore_eos=True)])
    assert from_text.prompt == "abc"
    assert from_ids.prompt is None
    assert from_text.prompt_token_ids == from_ids.prompt_token_ids == tuple(ids)
    assert from_text.token_ids == from_ids.token_ids == several[0].token_ids
    assert several[1].token_ids == from_text.token_ids[:2]


def test_pieces_of_a_stream_join_to_the_answers(llm):
    prompts = ["one prompt", "another"]
    texts = {}
    outputs = []
    for delta in llm.stream(prompts, GREEDY):
        texts[delta.request_id] = texts.get(delta.request_id, "") + delta.text
        if delta.output is not None:
            outputs.append(delta.output)
    assert sorted(output.prompt for output in outputs) == sorted(prompts)
    assert all(texts[output.request_id] == output.text for output in outputs)


def test_leaving_a_stream_aborts_what_is_unfinished(llm):
    for _ in llm.stream(["one prompt", "another"], GREEDY):
        break
    assert not llm.has_unfinished_requests
    llm.engine.cache_manager.check_integrity()


def test_if_one_of_the_prompts_is_refused_none_is_queued(llm):
    for bad, message in [([1] * 64, "64 tokens"), ([1, 10**6], "1000000"), ([], "at least one")]:
        with pytest.raises(JaxkvError, match=message):
            llm.generate(["fine", bad], GREEDY)
        assert not llm.has_unfinished_requests


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts must be text, token ids or a list of such, not None"),
        (b"abc", "prompts must be text"),
        ([None], "prompt 0 must be text or a list of token ids, not None"),
        (["fine", 7.5], "prompt 1 must be text or a list of token ids, not 7.5"),
        ([1, "a"], "prompt 0 must be text or a list of token ids, not 1"),
        ([[]], "prompt 0 must be a list of at least one token id"),
        ([[1.5]], "prompt 0 must be integers"),
        ([[[1, 2]]], "prompt 0 must be a list of at least one token id"),
        ([[1, [2]]], "prompt 0 must be a list of token ids"),
        ([True], "prompt 0 must be integers"),
        ([["a"]], "prompt 0 must be integers"),
        ([-1], "prompt 0"),
        ("a\ud800", "prompt 0 .* is not UTF-8 text: character 1"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(llm, prompts, message):
    for call in (llm.check, llm.generate):
        with pytest.raises(JaxkvError, match=message):
            call(prompts)
    assert not llm.has_unfinished_requests


def test_numpy_ids_are_prompts(llm):
    ids = llm.loaded.tokenizer.encode("abc")
    outputs = llm.generate([np.array(ids), ids], GREEDY) + llm.generate(np.array(ids), GREEDY)
    assert {output.token_ids for output in outputs} == {outputs[0].token_ids}


def test_parameters_are_one_or_as_many_as_prompts(llm):
    with pytest.raises(JaxkvError, match="2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    for bad in (5, [None], {"temperature": 0}):
        with pytest.raises(JaxkvError, match="params must be one SamplingParams or a list of them"):
            llm.generate("a", bad)


def test_metrics_count_tokens_blocks_and_hits(llm):
    llm.metrics.reset()
    before = llm.prefix_cache_stats.hits
    prompt = "a prompt that is asked twice"
    first, second = (llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4))[0] for _ in range(2))
    metrics = llm.metrics
    assert metrics.num_generated_tokens == len(first.token_ids) + len(second.token_ids)
    unit = llm.plan.scheduler_block_size
    assert second.num_cached_tokens == (len(first.prompt_token_ids) - 1) // unit * unit > 0
    assert llm.prefix_cache_stats.hits - before == second.num_cached_tokens
    assert 0 < metrics.peak_blocks_used <= metrics.usable_blocks
    assert 0 < metrics.host_time < metrics.busy_time
    assert metrics.tokens_per_second == metrics.num_generated_tokens / metrics.busy_time
    assert second.metrics.time_to_first_token is not None
    assert 0 < second.metrics.time_to_first_token <= second.metrics.time_total


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 10**6}, "4096"),
        ({"memory": "4KiB"}, "block"),
        ({"memory": "lots"}, "lots"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused(tiny, settings, message):
    with pytest.raises(JaxkvError, match=message):
        LLM(tiny, **settings)


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("seed", -1),
        ("seed", "x"),
        ("max_num_seqs", "2"),
        ("max_model_len", "x"),
        ("max_num_batched_tokens", 0),
    ],
)
def test_limits_that_are_no_sensible_numbers_are_refused_by_name(tiny, limit, value):
    with pytest.raises(JaxkvError, match=f"{limit} must be"):
        LLM(tiny, **{limit: value})


def test_a_pool_that_the_device_has_no_room_for_is_refused_with_its_size():
    with pytest.raises(JaxkvError, match="no room for a cache of 4096"):
        _allocate((1 << 30, 1 << 13, 128))
