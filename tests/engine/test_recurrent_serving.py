"""Recurrent states are found, restored and kept right: greedy tokens are those of a prompt served by itself
with nothing cached. All pages that hold nothing, and states not written yet, are NaN (`PoisoningRunner`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine.engine import Engine, Prompt
from jaxkv.engine.outputs import RequestOutput
from jaxkv.engine.sampling_params import SamplingParams
from jaxkv.specs import AttentionSpec
from tests.engine.recurrent import (
    FAMILIES,
    MAX_NUM_SEQS,
    MAX_TOKENS_A_STEP,
    NUM_BLOCKS,
    make_bench,
    tiny_model,
)
from tests.engine.serving import Bench, answers, run_to_end


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def drawn(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(6, 262, length).tolist()


@dataclass(frozen=True)
class Served:
    """A family's bench. alone: the tokens of a prompt served by itself, with nothing cached."""

    bench: Bench
    alone: Callable[[tuple[int, ...], int], tuple[int, ...]]

    def engine(self, **options: Any) -> Engine:
        usual: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "tokens_a_step": MAX_TOKENS_A_STEP}
        return self.bench.engine(**usual | options)

    def answer(self, engine: Engine, prompt: list[int], max_tokens: int = 6) -> RequestOutput:
        """The prompt's answer, which must be the right one."""
        [output] = answers(engine, [prompt], greedy(max_tokens))
        assert output.token_ids == self.alone(tuple(prompt), max_tokens)
        return output


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, tmp_path_factory) -> Served:
    return serve(make_bench(tiny_model(request.param, tmp_path_factory.mktemp("models") / request.param)))


def serve(bench: Bench) -> Served:
    """The bench, and what its model answers to a prompt alone; the pool is left as it was."""

    @cache
    def alone(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        engine = bench.engine(num_blocks=NUM_BLOCKS, tokens_a_step=MAX_TOKENS_A_STEP, caching=False)
        of_others = jnp.copy(bench.runner.pages)
        [output] = answers(engine, [prompt], greedy(max_tokens))
        bench.runner.pages = of_others
        return output.token_ids

    return Served(bench, alone)


def test_steps_update_the_pool_in_place(served):
    """A copy of the pool would take as much beside it."""
    pool = served.bench.runner.pages.nbytes
    for compiled in served.bench.runner.steps._compiled.values():
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == pool
        assert memory.temp_size_in_bytes < pool / 2


def test_a_prompt_sent_again_resumes_at_the_last_boundary_below_its_end(served):
    engine = served.engine()
    for length in (77, 64, 65):
        prompt = drawn(length, length)
        assert served.answer(engine, prompt).num_cached_tokens == 0
        assert served.answer(engine, prompt).num_cached_tokens == (length - 1) // 16 * 16


@pytest.mark.parametrize("num_checkpoints", [0, 1])
def test_a_prefix_seen_twice_is_kept_where_prompts_branch(served, num_checkpoints):
    engine = served.engine(num_checkpoints=num_checkpoints)
    shared = drawn(1, 50)
    first, second, third = (served.answer(engine, shared + drawn(i, 25)) for i in (2, 3, 4))
    assert [output.num_cached_tokens for output in (first, second, third)] == [0, 0, 48]
    assert first.cache_hit is not None
    assert second.cache_hit is not None
    assert (first.cache_hit.limited_by, first.cache_hit.lost_tokens) == (None, 0)
    assert (second.cache_hit.limited_by_kind, second.cache_hit.lost_tokens) == ("mamba", 48)


def test_a_chat_goes_on_where_the_answer_ended(served):
    engine = served.engine()
    prompt = drawn(5, 40)
    answer = served.answer(engine, prompt, 30)
    follow_up = [*prompt, *answer.token_ids, *drawn(6, 12)]
    # The last token of an answer is never computed: 69 are.
    assert served.answer(engine, follow_up).num_cached_tokens == 64


def test_states_inside_a_chunk_save_its_end_a_step(served):
    """A prompt of 60 tokens keeps the state at 48: in one step, or in two where chunks must end there."""
    steps = []
    for num_checkpoints in (0, 1):
        engine = served.engine(num_checkpoints=num_checkpoints)
        served.answer(engine, drawn(7, 60), 1)
        steps.append(engine.metrics.num_steps)
        assert served.answer(engine, drawn(7, 60), 1).num_cached_tokens == 48
    assert steps == [2, 1]


@pytest.mark.parametrize("caching", [False, True])
def test_preempted_requests_resume_with_the_same_tokens(served, caching):
    """Four requests of two blocks and a state fit, but not a third block each."""
    prompts = [drawn(i, 20) for i in range(10, 14)]
    plan = served.engine(max_model_len=96).scheduler.plan
    at_first = 4 * sum(
        max(group.blocks_per_state, 2 * isinstance(group.spec, AttentionSpec)) for group in plan.groups
    )
    engine = served.engine(
        max_model_len=96, num_blocks=1 + max(at_first + 4, sum(plan.blocks_per_request)), caching=caching
    )
    outputs = answers(engine, prompts, greedy(60))
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert [output.token_ids for output in outputs] == [served.alone(tuple(p), 60) for p in prompts]


def test_an_aborted_request_leaves_the_cache_right(served):
    engine = served.engine()
    prompt, other = drawn(20, 150), drawn(21, 30)
    doomed = engine.add_request(Prompt(token_ids=prompt), greedy(20))
    kept = engine.add_request(Prompt(token_ids=other), greedy(8))
    for _ in range(2):
        engine.step()
    engine.abort([doomed])
    assert run_to_end(engine)[kept].token_ids == served.alone(tuple(other), 8)
    assert served.answer(engine, prompt).num_cached_tokens == 128


@pytest.mark.parametrize("seed", range(3))
def test_mixed_batches_give_each_request_its_own_tokens(served, seed):
    """Prompts that begin alike arrive while others are read, decoded, preempted or aborted; all sizes of
    chunks and pools, with steps that overlap or not.
    """
    rng = np.random.default_rng(seed)
    overlap = bool(seed % 2)
    max_num_seqs = int(rng.integers(1, MAX_NUM_SEQS + 1))
    limits = {"max_model_len": 160, "overlap": overlap, "max_num_seqs": max_num_seqs}
    needed = sum(served.engine(**limits).scheduler.plan.blocks_per_request)
    engine = served.engine(
        **limits,
        caching=seed != 2,
        num_blocks=needed + 1 + int(rng.integers(0, 60)),
        tokens_a_step=int(rng.integers(max_num_seqs, MAX_TOKENS_A_STEP + 1)),
        num_checkpoints=int(rng.integers(0, 2)),
    )
    stems = [drawn(30 + seed, 100), drawn(40 + seed, 70)]
    prompts, outputs = {}, {}
    for i in range(8):
        stem = stems[int(rng.integers(2))]
        prompt = stem[: int(rng.integers(1, len(stem) + 1))] + drawn(100 * seed + i, int(rng.integers(0, 30)))
        prompts[engine.add_request(Prompt(token_ids=prompt), greedy(12))] = prompt
        for _ in range(int(rng.integers(0, 5))):
            outputs |= {d.request_id: d.output for d in engine.step() if d.output is not None}
            engine.cache_manager.check_integrity()
    aborted = list(prompts)[int(rng.integers(8))]
    outputs |= {d.request_id: d.output for d in engine.abort([aborted])}
    outputs |= run_to_end(engine)
    for request_id, prompt in prompts.items():
        expected = served.alone(tuple(prompt), 12)
        got = outputs[request_id].token_ids
        assert got == (expected[: len(got)] if request_id == aborted else expected)


def test_the_third_prompt_of_a_thousand_shared_tokens_skips_them(served):
    engine = served.engine()
    shared = drawn(50, 1000)
    outputs = [served.answer(engine, shared + drawn(i, 40), 4) for i in (51, 52, 53)]
    assert outputs[2].num_cached_tokens >= 992
    second = outputs[1].cache_hit
    assert second is not None
    assert second.limited_by is not None
    assert served.bench.runner.plan.groups[second.limited_by].spec.kind == second.limited_by_kind == "mamba"
    assert second.tokens_by_group[0] == 992
    assert second.lost_tokens == 992 - outputs[1].num_cached_tokens


@pytest.fixture(scope="module")
def unified(tmp_path_factory) -> Served:
    """Jamba under the other policy, one page a state; hits may end inside a block."""
    loaded = tiny_model("jamba", tmp_path_factory.mktemp("models") / "unified")
    return serve(make_bench(loaded, policy="unified", prefix_match_unit=8))


def test_hits_that_end_inside_a_block_copy_it(unified):
    engine = unified.engine()
    assert [group.block_size for group in engine.scheduler.plan.groups] == [16, 16, 16]
    shared = drawn(1, 60)
    prompts = [shared + drawn(i, 25) for i in (2, 3, 4)]
    assert [unified.answer(engine, prompt).num_cached_tokens for prompt in prompts] == [0, 0, 56]
    assert [unified.answer(engine, prompt).num_cached_tokens for prompt in prompts] == [80, 80, 80]
