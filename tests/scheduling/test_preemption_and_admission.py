"""Who gets blocks when they are short: reservation at admission, waiting, preemption, resumption."""

import pytest

from tests.scheduling.serving import Serving, continuation, full, window


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 1000 + 7 * i) % 5000 for i in range(length)]


def test_admission_reserves_the_whole_prompt_of_those_still_reading() -> None:
    # 15 blocks. a and b want 10 each: both fit at their first chunk, but not to their ends.
    serving = Serving([full()], 16, max_num_batched_tokens=16, long_prefill_token_threshold=8)
    serving.add("a", prompt(1, 40), max_tokens=1)
    serving.add("b", prompt(2, 40), max_tokens=1)
    admitted = {name: step for step, o in enumerate(serving.run()) for name in o.admitted}
    assert admitted == {"a": 0, "b": 5}
    assert serving.scheduler.stats.num_preemptions == 0


def test_a_small_request_does_not_pass_a_large_one_that_waits() -> None:
    serving = Serving([full()], 16, max_num_batched_tokens=16)
    serving.add("a", prompt(1, 40), max_tokens=2)
    serving.add("big", prompt(2, 40), max_tokens=1)
    serving.add("small", prompt(3, 4), max_tokens=1)
    admitted = {name: step for step, o in enumerate(serving.run()) for name in o.admitted}
    assert admitted["a"] < admitted["big"] <= admitted["small"]


def test_tokens_in_flight_are_reserved_once_for_all_windows() -> None:
    # Window 8 with 16 tokens in flight: a prompt alone can hold floor(21 / 4) + 2 = 7 blocks; two together
    # 3 + 3 and 14 spare tokens: 2 first crossings of 2 tokens, then 10 // 4 more.
    serving = Serving(
        [window(8)], 11, max_num_batched_tokens=16, max_num_seqs=2, max_model_len=128, enable_caching=False
    )
    serving.add("a", prompt(1, 60), max_tokens=1)
    serving.add("b", prompt(2, 60), max_tokens=1)
    assert serving.step().admitted == ("a",)  # its chunk takes the whole budget
    serving.step()
    assert serving.scheduler.num_requests_running == 1
    serving.run()
    tight = Serving(
        [window(8)],
        11,
        max_num_batched_tokens=16,
        long_prefill_token_threshold=8,
        max_num_seqs=2,
        max_model_len=128,
        enable_caching=False,
    )
    tight.add("a", prompt(1, 60), max_tokens=1)
    tight.add("b", prompt(2, 60), max_tokens=1)
    assert tight.step().admitted == ("a", "b")  # 10 blocks are enough for both
    tight.run()
    assert tight.scheduler.stats.num_preemptions == 0


def test_prompts_that_are_read_whole_in_one_step_want_no_more_than_they_take() -> None:
    # 6 prompts of 8 tokens take 2 blocks in each of 2 groups: 24 blocks, all there are.
    serving = Serving([full(), window(8)], 25, max_num_batched_tokens=48, enable_caching=False)
    for i in range(6):
        serving.add(f"r{i}", prompt(i, 8), max_tokens=1)
    assert len(serving.step().admitted) == 6


def test_the_watermark_keeps_blocks_free_while_others_run() -> None:
    # 20 blocks, of which a takes 5 and b wants 5: b may leave 10 free, but not 11.
    for watermark, expected in ((0.5, ("a", "b")), (0.55, ("a",))):
        serving = Serving([full()], 21, max_num_batched_tokens=32, watermark=watermark)
        serving.add("a", prompt(1, 20), max_tokens=8)
        serving.add("b", prompt(2, 20), max_tokens=8)
        output = serving.step()
        assert output.admitted + serving.step().admitted == expected
        serving.run()


def test_the_latest_arrival_is_preempted_and_resumes_first_with_a_hit() -> None:
    # 11 blocks: three prompts of 3 blocks, each decoding past its third block in turn; new requests wait.
    serving = Serving([full()], 12, max_num_batched_tokens=36)
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        serving.add(name, prompt(seed, 11), max_tokens=9)
    serving.add("d", prompt(4, 11), max_tokens=2)
    outputs = serving.run()
    preempted = [name for o in outputs for name in o.preempted]
    assert preempted
    assert preempted[0] == "c"
    order = [name for o in outputs for name in o.admitted]
    assert order[:4] == ["a", "b", "c", "c"]
    c = serving.requests["c"]
    assert c.num_cached_tokens == 0
    assert c.num_cached_tokens_on_resume > 0
    for name, seed, count in (("a", 1, 9), ("b", 2, 9), ("c", 3, 9), ("d", 4, 2)):
        assert serving.requests[name].output_token_ids.tolist() == continuation(prompt(seed, 11), count)


def test_the_latest_arrival_waits_with_its_blocks_rather_than_give_them_up() -> None:
    # 7 blocks: a holds 4 and ends, b holds 3 and wants a fourth before that.
    serving = Serving([full()], 8, max_num_batched_tokens=32)
    serving.add("a", prompt(1, 13), max_tokens=4)
    serving.add("b", prompt(2, 11), max_tokens=4)
    outputs = serving.run()
    assert serving.scheduler.stats.num_preemptions == 0
    scheduled = [set(o.num_scheduled_tokens()) for o in outputs]
    assert {"a"} in scheduled  # b waited
    assert serving.requests["b"].output_token_ids.tolist() == continuation(prompt(2, 11), 4)


def test_nothing_is_admitted_while_a_running_request_waits_for_blocks() -> None:
    serving = Serving([full()], 8, max_num_batched_tokens=32)
    serving.add("a", prompt(1, 13), max_tokens=4)
    serving.add("b", prompt(2, 11), max_tokens=4)
    serving.step()
    serving.add("c", prompt(3, 2), max_tokens=1)
    outputs = serving.run()
    first_without_b = next(i for i, o in enumerate(outputs) if "b" not in o.request_ids.tolist())
    assert all("c" not in o.admitted for o in outputs[: first_without_b + 1])


def test_a_request_that_was_refused_is_not_looked_at_again_until_something_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serving = Serving([full(16)], 4, max_num_batched_tokens=48, max_model_len=64)
    serving.add("a", prompt(1, 17), max_tokens=14)
    serving.add("b", prompt(2, 33), max_tokens=2)
    serving.step()
    lookups = []
    original = serving.kv.get_computed_blocks
    monkeypatch.setattr(serving.kv, "get_computed_blocks", lambda r: lookups.append(r) or original(r))
    for _ in range(8):
        assert serving.step().num_scheduled_tokens() == {"a": 1}
    assert len(lookups) <= 1
    serving.run()
    assert serving.requests["b"].num_output_tokens == 2


@pytest.mark.parametrize("length", [7, 8, 9, 12])
def test_two_that_fill_the_pool_exactly_both_end(length: int) -> None:
    serving = Serving([full(), window(6)], 13, max_num_batched_tokens=16)
    serving.add("a", prompt(1, length), max_tokens=12)
    serving.add("b", prompt(2, length), max_tokens=12)
    serving.run()
    for name, seed in (("a", 1), ("b", 2)):
        assert serving.requests[name].output_token_ids.tolist() == continuation(prompt(seed, length), 12)
    assert serving.requests["a"].num_preemptions == 0
