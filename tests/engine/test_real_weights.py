"""Gemma 3 270M, packaged weights in float32, against transformers' greedy tokens (scripts/make_golden.py)."""

from pathlib import Path

import numpy as np
import pytest

from jaxkv import LLM, SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden" / "gemma3_270m.npz"


@pytest.fixture(scope="module")
def golden():
    """By prompt: its token ids, and those that follow."""
    with np.load(GOLDEN) as file:
        pairs = []
        for i in range(int(file["num_prompts"])):
            tokens, length = file[f"tokens_{i}"].tolist(), int(file[f"num_prompt_{i}"])
            pairs.append((tokens[:length], tuple(tokens[length:])))
    return pairs


@pytest.fixture(scope="module")
def llm():
    return LLM(
        "gemma3-270m",
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        memory="96MiB",
        decode_buckets=(4,),
        prefill_buckets=(256,),
    )


def test_greedy_tokens_equal_those_of_transformers_all_served_together(llm, golden):
    assert sorted(len(prompt) for prompt, _ in golden) == [64] * 5 + [1500]
    length = len(golden[0][1])
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    outputs = llm.generate([prompt for prompt, _ in golden], params)
    assert [output.token_ids for output in outputs] == [answer for _, answer in golden]
    assert llm.engine.scheduler.stats.num_requests_running == 0
    llm.engine.cache_manager.check_integrity()


def test_a_long_prompt_served_from_the_cache_gives_the_same_tokens(llm, golden):
    prompt, answer = max(golden, key=lambda pair: len(pair[0]))
    params = SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True)
    [_, output] = (llm.generate([prompt], params)[0] for _ in range(2))
    assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    assert output.token_ids == answer
