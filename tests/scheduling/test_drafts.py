"""Drafts: whatever a draft model proposes, requests get the model's own answer, and the cache its content."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxkv.cache_manager import KVCacheManager
from jaxkv.errors import JaxkvError
from jaxkv.managers import MambaManager
from jaxkv.planning.plan import CachePlan
from jaxkv.request import Request
from jaxkv.request_table import NO_TOKEN
from jaxkv.scheduling import Scheduler, SchedulerConfig
from jaxkv.specs import KVCacheSpec, RequestLimits
from tests.scheduling.serving import continuation, full, make_plan, mamba, next_token, window

NUM_DRAFTS = 3


def plan_with_lookahead(specs: Sequence[KVCacheSpec], num_blocks: int, lookahead: int) -> CachePlan:
    limits = RequestLimits(max_model_len=64, max_in_flight_tokens=16, num_lookahead_tokens=lookahead)
    return dataclasses.replace(make_plan(specs, num_blocks, 64, 16), limits=limits)


class Drafting:
    """An engine with a draft model that is right about the first few tokens (a number drawn anew each time),
    and a record of what every slot of full attention (group 0) holds: the prefix it was computed from.
    """

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        num_blocks: int,
        seed: int,
        *,
        lookahead: int = NUM_DRAFTS,
        **config: Any,
    ) -> None:
        self.plan = plan_with_lookahead(specs, num_blocks, lookahead)
        self.kv = KVCacheManager(self.plan, max_num_seqs=8)
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "num_speculative_tokens": NUM_DRAFTS}
        self.scheduler = Scheduler(self.plan, self.kv, SchedulerConfig(**{**options, **config}))
        self.rng = np.random.default_rng(seed)
        self.requests: dict[str, Request] = {}
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}

    def add(self, name: str, prompt: Sequence[int], max_tokens: int, **options: Any) -> Request:
        self.requests[name] = request = Request(name, prompt, max_tokens, **options)
        self.scheduler.add_request(request)
        return request

    def slots(self, name: str, start: int, stop: int) -> list[tuple[int, int]]:
        ids, size = self.kv.get_block_ids(name)[0], self.plan.groups[0].spec.block_size
        return [(ids[position // size], position % size) for position in range(start, stop)]

    def step(self, *, propose: bool = False) -> None:
        """One turn, and drafts for the next if asked."""
        output = self.scheduler.schedule()
        arrays = output.token_arrays(self.scheduler.table)
        num_drafts = np.zeros(len(output), int) if output.num_drafts is None else output.num_drafts
        sampled: list[list[int]] = []
        for index, name in enumerate(output.request_ids.tolist()):
            start, count = int(output.num_computed[index]), int(output.num_scheduled[index])
            first = int(arrays.query_starts[index])
            tokens = arrays.tokens[first : first + count].tolist()
            known = [*self.requests[name].token_ids().tolist()[:start], *tokens]
            for slot, position in zip(self.slots(name, 0, start), range(start), strict=True):
                assert self.content[slot] == tuple(known[: position + 1])
            for slot, position in zip(
                self.slots(name, start, start + count), range(start, start + count), strict=True
            ):
                self.content[slot] = tuple(known[: position + 1])
            if output.samples[index]:
                verified: list[int] = []
                for place in range(start + count - int(num_drafts[index]), start + count + 1):
                    verified.append(next_token(np.array(known[:place], np.int32)))
                    if place < len(known) and known[place] != verified[-1]:
                        break
                sampled.append(verified)
        given = sampled if output.num_drafts is not None else [tokens[0] for tokens in sampled]
        self.scheduler.update_from_output(output, given)
        self.kv.check_integrity()
        if propose:
            self.scheduler.update_draft_token_ids({name: self.draft(name) for name in self.requests})

    def draft(self, name: str) -> list[int]:
        tokens = self.requests[name].token_ids().tolist()
        right = continuation(tokens, int(self.rng.integers(0, NUM_DRAFTS + 1)))
        return [*right, *[499] * (NUM_DRAFTS - len(right))]

    def run(self) -> int:
        steps = 0
        while self.scheduler.has_unfinished_requests:
            self.step(propose=True)
            steps += 1
            assert steps < 500
        return steps


@pytest.mark.parametrize("specs", [[full()], [full(), window(6)], [full(8), window(5, 4)], [full(), mamba()]])
@pytest.mark.parametrize("num_blocks", [100, 26])
def test_answers_and_cached_content_are_the_same_whatever_is_proposed(
    specs: list[KVCacheSpec], num_blocks: int
) -> None:
    for seed in range(4):
        engine = Drafting(specs, num_blocks, seed)
        prompts = [[seed, *range(3 * i)] for i in range(1, 6)]
        for i, prompt in enumerate(prompts):
            engine.add(f"r{i}", prompt, 17)
        steps = engine.run()
        for i, prompt in enumerate(prompts):
            answer = engine.requests[f"r{i}"].output_token_ids.tolist()
            assert answer == continuation(prompt, 17)
            # Hits on what was computed beside rejected drafts: `step` compares the content.
            engine.add(f"again{i}", [*prompt, *answer, 7], 2)
        engine.run()
        hits = [engine.requests[f"again{i}"].num_cached_tokens for i in range(5)]
        stats = engine.scheduler.stats
        assert stats.spec_decode_num_accepted_tokens > 0
        assert stats.spec_decode_num_draft_tokens > stats.spec_decode_num_accepted_tokens
        if num_blocks == 100:
            assert all(hits)
            assert steps < 5 * 17 / 2
        assert engine.kv.num_free_blocks == num_blocks - 1


def test_a_confirmed_draft_is_two_tokens_in_one_step() -> None:
    engine = Drafting([full()], 40, 0)
    request = engine.add("a", [1, 2, 3], 8)
    engine.step()
    engine.scheduler.update_draft_token_ids({"a": continuation(request.token_ids().tolist(), 2)})
    output = engine.scheduler.schedule()
    assert output.num_scheduled.tolist() == [3]
    assert output.num_drafts is not None
    assert output.num_drafts.tolist() == [2]
    tokens = continuation(request.token_ids().tolist(), 3)
    result = engine.scheduler.update_from_output(output, [tokens])
    assert list(result.new_tokens()) == [("a", token) for token in tokens]
    assert result.num_output_tokens.tolist() == [2, 3, 4]
    assert request.num_computed_tokens == request.num_tokens - 1 == 6


def test_a_rejected_draft_is_computed_again_in_its_place() -> None:
    engine = Drafting([full(), window(4)], 40, 0)
    request = engine.add("a", [1, 2, 3], 8)
    engine.step()
    engine.scheduler.update_draft_token_ids({"a": [499, 499]})
    output = engine.scheduler.schedule()
    assert request.num_computed_tokens == 3 + 3
    right = continuation(request.token_ids().tolist(), 1)
    engine.scheduler.update_from_output(output, np.array([[*right, NO_TOKEN, NO_TOKEN]], np.int32))
    assert request.num_computed_tokens == request.num_tokens - 1 == 4
    assert engine.scheduler.schedule().num_computed.tolist() == [4]


def test_an_end_token_among_confirmed_drafts_ends_the_answer_there() -> None:
    answer = continuation([1, 2, 3], 4)
    engine = Drafting([full()], 40, 0)
    request = engine.add("a", [1, 2, 3], 8, end_token_ids=[answer[2]])
    engine.step()
    engine.scheduler.update_draft_token_ids({"a": answer[1:4]})
    output = engine.scheduler.schedule()
    result = engine.scheduler.update_from_output(output, [[*answer[1:4], 5]])
    assert request.output_token_ids.tolist() == answer[:3]
    assert [ended.reason for ended in result.finished] == ["stop"]
    assert engine.kv.num_free_blocks == 39


def test_drafts_do_not_pass_the_end_of_an_answer_nor_the_budget() -> None:
    engine = Drafting([full()], 40, 0, max_num_batched_tokens=8, max_num_seqs=8)
    engine.add("a", [1, 2, 3], 3)
    engine.add("b", [4, 5, 6], 30)
    engine.step()
    engine.step()
    engine.scheduler.update_draft_token_ids({"a": [1, 2, 3], "b": [1, 2, 3]})
    for i in range(3):
        engine.add(f"late{i}", [7, 8, 9 + i], 3)
    output = engine.scheduler.schedule()
    assert output.num_drafts is not None
    by_name = dict(zip(output.request_ids.tolist(), output.num_drafts.tolist(), strict=True))
    # a: the third token is its last, so nothing after it is computed.
    assert by_name["a"] == 0
    assert by_name["b"] == 3
    assert output.total_num_scheduled_tokens == 8


def test_drafts_cost_nobody_its_blocks() -> None:
    # Both have all blocks that their last tokens need, drafts of a would take one more.
    engine = Drafting([full()], 4, 0, lookahead=0)
    a = engine.add("a", [1, 2, 3, 4, 5, 6], 3)
    b = engine.add("b", [1, 9], 3)
    engine.step()
    engine.scheduler.update_draft_token_ids({"b": [1, 2, 3]})
    engine.step()
    assert (a.num_preemptions, b.num_preemptions) == (0, 0)
    assert (a.num_output_tokens, b.num_output_tokens) == (2, 2)


def test_room_for_lookahead_is_given_in_every_step() -> None:
    engine = Drafting([full()], 40, 0, lookahead=5)
    engine.add("a", [1, 2], 30)
    while engine.requests["a"].num_tokens < 20:
        engine.step()
        held = len(engine.kv.get_block_ids("a")[0])
        assert held * 4 >= engine.requests["a"].num_computed_tokens + 5


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        ([[5, 6]], r"got \[5, 6\]; all but the last must be its drafts \[499, 499\]"),
        ([[]], "it must get 1 to 3 tokens"),
        ([[499, 499, 5, 6]], "it must get 1 to 3 tokens"),
        ([[499, -1, 5]], "padded at the end"),
        ([5], "it needs a list of tokens for each"),
        ([[5], [5]], "samples tokens for 1 rows"),
        ([[1.5]], "must be integers, got dtype float64"),
        ([[2**31]], "token id 2147483648 at index 0"),
        ([[-2]], "token id -2 at index 0"),
    ],
)
def test_results_that_do_not_fit_the_drafts_are_refused(sampled: list[Any], message: str) -> None:
    engine = Drafting([full()], 40, 0)
    request = engine.add("a", [1, 2, 3], 8)
    engine.step()
    engine.scheduler.update_draft_token_ids({"a": [499, 499]})
    output = engine.scheduler.schedule()
    before = (request.num_tokens, request.num_computed_tokens, engine.kv.num_free_blocks)
    with pytest.raises(JaxkvError, match=message):
        engine.scheduler.update_from_output(output, sampled)
    assert (request.num_tokens, request.num_computed_tokens, engine.kv.num_free_blocks) == before
    engine.scheduler.update_from_output(output, [[5]])


def test_drafts_at_the_wrong_time_or_for_nobody() -> None:
    engine = Drafting([full()], 40, 0)
    request = engine.add("a", [1, 2, 3], 8)
    engine.scheduler.update_draft_token_ids({"a": [1], "nobody": [2]})  # neither decodes
    engine.step()
    with pytest.raises(JaxkvError, match=r"drafts of request 'a' must lie in \[0, 2147483647\], got -1"):
        engine.scheduler.update_draft_token_ids({"a": [-1]})
    engine.scheduler.update_draft_token_ids({"a": [1, 2, 3, 4, 5]})
    engine.scheduler.update_draft_token_ids({"a": []})
    output = engine.scheduler.schedule()
    assert output.num_drafts is None
    with pytest.raises(JaxkvError, match="step 1 is in flight: drafts follow its results"):
        engine.scheduler.update_draft_token_ids({"a": [1]})
    assert request.num_tokens == 4
    plain = Scheduler(
        engine.plan, KVCacheManager(engine.plan), SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=8)
    )
    with pytest.raises(JaxkvError, match="num_speculative_tokens is 0"):
        plain.update_draft_token_ids({})
    with pytest.raises(JaxkvError, match="num_speculative_tokens 2 goes with async_scheduling off only"):
        SchedulerConfig(num_speculative_tokens=2, async_scheduling=True)


def test_what_was_rejected_is_taken_back_only_as_far_as_it_went() -> None:
    kv = KVCacheManager(plan_with_lookahead([full(), window(4)], 40, 0))
    request = Request("a", list(range(6)))
    kv.allocate_slots(request, 6)
    request.num_computed_tokens = 6
    request.append_tokens([1])
    kv.allocate_slots(request, 3)
    for tokens in (6, 10, -1):
        with pytest.raises(JaxkvError, match=f"ran from 6 to 9 tokens: it cannot be taken back to {tokens}"):
            kv.rewind(np.array([0]), np.array([tokens]))
    with pytest.raises(JaxkvError, match="1 rows need as many token counts, not 2"):
        kv.rewind(np.array([0]), np.array([7, 8]))
    kv.rewind(np.array([0]), np.array([7]))
    request.num_computed_tokens = 7
    with pytest.raises(JaxkvError, match="cannot be taken back to 6"):
        kv.rewind(np.array([0]), np.array([6]))
    kv.check_integrity()


@pytest.mark.parametrize("next_size", [1, 3])
def test_a_state_left_among_rejected_drafts_goes_with_them(next_size: int) -> None:
    """The step from 6 to 10 tokens leaves a state at 8, but only the first 7 tokens stand."""
    spec = dataclasses.replace(mamba(), num_prefill_checkpoint_blocks=1)
    kv = KVCacheManager(plan_with_lookahead([full(), spec], 40, 0), retention_interval=4)
    states = kv.managers[1]
    assert isinstance(states, MambaManager)
    request = Request("a", list(range(6)))
    kv.allocate_slots(request, 6)
    request.num_computed_tokens = 6
    request.append_tokens([1])
    kv.allocate_slots(request, 4)
    (wrong,) = states.step_checkpoints(np.array([0]), np.array([6])).leaders
    kv.rewind(np.array([0]), np.array([7]))
    kv.check_integrity()
    assert kv.pool.holders[wrong] < 1
    request.num_computed_tokens = 7
    request.append_tokens([1])
    kv.allocate_slots(request, next_size)
    kv.check_integrity()
    # After 8 tokens there is the state of the new step: the one it ends with, or one that it leaves inside.
    found = states.index.units[request.block_hashes(kv.hasher)[1]]
    inside = states.step_checkpoints(np.array([0]), np.array([7])).leaders.tolist()
    assert [found] == (inside or [states.current[0]])
    kv.free(request)
    assert kv.num_free_blocks == 39


def test_a_state_left_where_the_confirmed_drafts_end_is_let_go_of_once() -> None:
    spec = dataclasses.replace(mamba(), num_prefill_checkpoint_blocks=1)
    kv = KVCacheManager(plan_with_lookahead([full(), spec], 40, 0), retention_interval=4)
    request = Request("a", list(range(6)))
    kv.allocate_slots(request, 6)
    for start, known, size, stands in ((6, [1], 4, 8), (8, [1, 2], 6, 13)):
        request.num_computed_tokens = start
        request.append_tokens(known)
        kv.allocate_slots(request, size)
        kv.check_integrity()
        kv.rewind(np.array([0]), np.array([stands]))
        kv.check_integrity()
    kv.free(request)
    assert kv.num_free_blocks == 39
