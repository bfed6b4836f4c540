"""Every rule of the scheduler on small cases worked out by hand (blocks of 4 tokens unless a case says
otherwise).
"""

import numpy as np
import pytest

from jaxkv.errors import JaxkvError
from jaxkv.request import Request, RequestStatus
from jaxkv.scheduling import Scheduler, SchedulerConfig
from tests.scheduling.serving import Serving, continuation, full, mamba, window


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 1000 + 7 * i) % 5000 for i in range(length)]


# Budget, chunks, order


def test_a_prompt_longer_than_the_budget_is_read_in_chunks() -> None:
    serving = Serving([full()], 40, max_num_batched_tokens=16)
    serving.add("a", prompt(1, 40), max_tokens=2)
    outputs = serving.run()
    assert [o.num_scheduled_tokens() for o in outputs] == [{"a": 16}, {"a": 16}, {"a": 8}, {"a": 1}]
    assert [o.samples.tolist() for o in outputs] == [[False], [False], [True], [True]]
    assert serving.requests["a"].output_token_ids.tolist() == continuation(prompt(1, 40), 2)


def test_decodes_come_first_and_prompts_share_what_is_left() -> None:
    serving = Serving([full()], 60, max_num_batched_tokens=16)
    serving.add("a", prompt(1, 5), max_tokens=10)
    serving.step()
    serving.add("b", prompt(2, 20), max_tokens=4)
    output = serving.step()
    assert output.request_ids.tolist() == ["a", "b"]
    assert output.num_scheduled.tolist() == [1, 15]
    assert (output.num_decodes, output.total_num_scheduled_tokens) == (1, 16)
    serving.add("c", prompt(3, 3), max_tokens=4)
    output = serving.step()
    assert output.num_scheduled_tokens() == {"a": 1, "b": 5, "c": 3}


def test_a_chunk_of_one_token_is_listed_among_the_decodes() -> None:
    serving = Serving([full()], 60, max_num_batched_tokens=16)
    serving.add("a", prompt(1, 17), max_tokens=4)
    serving.add("b", prompt(2, 9), max_tokens=4)
    serving.step()
    output = serving.step()
    assert output.request_ids.tolist() == ["a", "b"]
    assert output.num_scheduled.tolist() == [1, 9]
    assert output.num_decodes == 1
    assert output.samples.tolist() == [True, True]


def test_max_num_seqs_limits_the_running_requests() -> None:
    serving = Serving([full()], 60, max_num_seqs=2)
    for name in "abc":
        serving.add(name, prompt(ord(name), 3), max_tokens=2)
    assert serving.step().num_scheduled_tokens() == {"a": 3, "b": 3}
    stats = serving.scheduler.stats
    assert (stats.num_requests_running, stats.num_requests_waiting) == (2, 1)
    assert serving.step().num_scheduled_tokens() == {"a": 1, "b": 1}
    assert serving.step().num_scheduled_tokens() == {"c": 3}


def test_long_prompts_are_cut_only_while_others_live() -> None:
    serving = Serving([full()], 60, max_num_batched_tokens=16, long_prefill_token_threshold=6)
    serving.add("a", prompt(1, 40), max_tokens=2)
    assert serving.step().num_scheduled_tokens() == {"a": 16}
    serving.add("b", prompt(2, 30), max_tokens=2)
    assert serving.step().num_scheduled_tokens() == {"a": 6, "b": 6}


def test_requests_are_served_in_the_order_of_arrival_and_priority() -> None:
    serving = Serving([full()], 60, max_num_seqs=1)
    serving.add("third", prompt(1, 3), max_tokens=1, arrival=9.0)
    serving.add("second", prompt(2, 3), max_tokens=1, arrival=4.0)
    serving.add("first", prompt(3, 3), max_tokens=1, arrival=50.0, priority=-1)
    order = [name for output in serving.run() for name in output.admitted]
    assert order == ["first", "second", "third"]


def test_token_arrays_lay_the_step_end_to_end() -> None:
    serving = Serving([full()], 60, max_num_batched_tokens=16)
    serving.add("a", prompt(1, 5), max_tokens=10)
    serving.step()
    serving.add("b", prompt(2, 3), max_tokens=4)
    output = serving.schedule()
    arrays = output.token_arrays(serving.scheduler.table)
    assert arrays.tokens.tolist() == [*continuation(prompt(1, 5), 1), *prompt(2, 3)]
    assert arrays.positions.tolist() == [5, 0, 1, 2]
    assert arrays.query_starts.tolist() == [0, 1, 4]
    assert arrays.seq_lens.tolist() == [6, 3]
    assert not arrays.on_device.any()
    serving.update()
    arrays = serving.schedule().token_arrays(serving.scheduler.table)
    assert arrays.tokens.tolist() == [continuation(prompt(1, 5), 2)[1], *continuation(prompt(2, 3), 1)]
    assert arrays.query_starts.tolist() == [0, 1, 2]


# Ends


def test_an_end_token_stops_a_request() -> None:
    answer = continuation(prompt(1, 5), 10)
    serving = Serving([full()], 60)
    serving.add("a", prompt(1, 5), max_tokens=10, end_token_ids=[answer[3]])
    serving.run()
    request = serving.requests["a"]
    assert request.finish_reason == "stop"
    assert request.output_token_ids.tolist() == answer[: answer.index(answer[3]) + 1]


def test_max_tokens_and_max_model_len_end_a_request() -> None:
    serving = Serving([full()], 60, max_model_len=12)
    serving.add("short", prompt(1, 5), max_tokens=3)
    serving.add("long", prompt(2, 5), max_tokens=100)
    serving.run()
    for name, count in (("short", 3), ("long", 7)):
        assert serving.requests[name].finish_reason == "length"
        assert serving.requests[name].output_token_ids.tolist() == continuation(
            serving.requests[name].prompt_token_ids.tolist(), count
        )


def test_results_tell_new_tokens_and_who_ended() -> None:
    serving = Serving([full()], 60)
    serving.add("a", prompt(1, 5), max_tokens=1)
    serving.add("b", prompt(2, 5), max_tokens=2)
    serving.schedule()
    result = serving.update()
    assert dict(result.new_tokens()) == {
        "a": continuation(prompt(1, 5), 1)[0],
        "b": continuation(prompt(2, 5), 1)[0],
    }
    assert result.num_output_tokens.tolist() == [1, 1]
    assert [(f.request.request_id, f.reason) for f in result.finished] == [("a", "length")]
    assert serving.schedule().finished == ("a",)


def test_a_stop_string_ends_a_request_from_outside() -> None:
    serving = Serving([full()], 60)
    serving.add("a", prompt(1, 5), max_tokens=9)
    serving.step()
    assert serving.scheduler.finish_request("a")
    assert not serving.scheduler.finish_request("a")
    assert serving.requests["a"].finish_reason == "stop"
    assert not serving.scheduler.has_unfinished_requests
    assert serving.kv.num_free_blocks == 59


@pytest.mark.parametrize("when", ["waiting", "reading", "decoding"])
def test_a_request_can_be_aborted_at_any_time(when: str) -> None:
    serving = Serving([full()], 60, max_num_batched_tokens=16)
    serving.add("a", prompt(1, 20), max_tokens=9)
    for _ in range({"waiting": 0, "reading": 1, "decoding": 3}[when]):
        serving.step()
    assert serving.scheduler.abort("a")
    assert serving.requests["a"].finish_reason == "abort"
    assert serving.kv.num_free_blocks == 59
    serving.kv.check_integrity()
    assert len(serving.schedule()) == 0


def test_results_of_a_request_aborted_during_the_step_are_dropped() -> None:
    serving = Serving([full()], 60)
    serving.add("a", prompt(1, 5), max_tokens=9)
    serving.add("b", prompt(2, 5), max_tokens=9)
    serving.schedule()
    serving.scheduler.abort("a")
    assert serving.kv.num_free_blocks < 59 - 2  # the step may still write its blocks
    result = serving.update()
    assert result.request_ids.tolist() == ["b"]
    assert result.indices.tolist() == [1]
    assert serving.requests["a"].num_output_tokens == 0
    assert serving.kv.num_free_blocks == 59 - 2


# Refusals


def test_a_request_that_can_never_fit_is_refused_with_the_numbers_and_changes_nothing() -> None:
    serving = Serving([full()], 11, max_model_len=64)
    with pytest.raises(JaxkvError, match=r"'big'.* 51 tokens.*13 blocks.*10 .*40 tokens"):
        serving.add("big", prompt(1, 48), max_tokens=4)
    assert serving.scheduler.num_requests_waiting == 0
    serving.add("small", prompt(2, 20), max_tokens=4)
    serving.run()
    assert serving.requests["small"].num_output_tokens == 4


def test_a_window_counts_with_the_tokens_in_flight_and_no_more() -> None:
    # 40 tokens: 10 blocks of full attention; window 8 with 7 in flight touches at most floor(12 / 4) + 2 = 5.
    serving = Serving([full(), window(8)], 16, max_num_batched_tokens=7, max_num_seqs=2, enable_caching=False)
    serving.add("a", prompt(1, 40), max_tokens=1)
    serving.run()
    assert serving.requests["a"].num_preemptions == 0
    with pytest.raises(JaxkvError, match="16 blocks"):
        serving.add("b", prompt(2, 41), max_tokens=1)


def test_bad_requests_are_refused() -> None:
    serving = Serving([full()], 60, max_model_len=16)
    with pytest.raises(JaxkvError, match=r"prompt of 16 tokens; with max_model_len 16 .* at most 15"):
        serving.add("a", prompt(1, 16))
    serving.add("a", prompt(1, 4))
    with pytest.raises(JaxkvError, match="request id 'a' is already in use"):
        serving.add("a", prompt(1, 4))
    request = serving.requests["a"]
    serving.scheduler.abort("a")
    with pytest.raises(JaxkvError, match="'a' was already served: FINISHED_ABORTED"):
        serving.scheduler.add_request(request)
    assert not serving.scheduler.abort("nobody")


def test_bad_results_are_refused_and_change_nothing() -> None:
    serving = Serving([full()], 60)
    serving.add("a", prompt(1, 5))
    scheduler = serving.scheduler
    output = scheduler.schedule()
    with pytest.raises(JaxkvError, match=r"step 0 samples 1 tokens, got an array of shape \(2,\)"):
        scheduler.update_from_output(output, np.array([1, 2], np.int32))
    with pytest.raises(JaxkvError, match=r"token id -3 at index 0 of step 0 is not in \[0, 2147483647\]"):
        scheduler.update_from_output(output, np.array([-3], np.int32))
    with pytest.raises(JaxkvError, match="the tokens of step 0 must be integers, got dtype float64"):
        scheduler.update_from_output(output, [1.5])  # pyright: ignore[reportArgumentType]
    with pytest.raises(JaxkvError, match=r"token id 2147483648 at index 0 of step 0 is not in"):
        scheduler.update_from_output(output, [2**31])
    with pytest.raises(JaxkvError, match="1 steps are in flight and async_scheduling is False"):
        scheduler.schedule()
    scheduler.update_from_output(output, np.array([3], np.int32))
    with pytest.raises(JaxkvError, match="results of step 0 arrived, but no step is the oldest in flight"):
        scheduler.update_from_output(output, np.array([3], np.int32))
    assert serving.requests["a"].output_token_ids.tolist() == [3]


def test_bad_configurations_are_refused() -> None:
    with pytest.raises(JaxkvError, match="max_num_batched_tokens 4 is smaller than max_num_seqs 8"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=4)
    with pytest.raises(JaxkvError, match=r"watermark must be a number in \[0, 1\), not 1.0"):
        SchedulerConfig(watermark=1.0)
    with pytest.raises(JaxkvError, match="max_num_seqs must be an integer of at least 1, not 0"):
        SchedulerConfig(max_num_seqs=0)
    with pytest.raises(
        JaxkvError, match="serves another plan, of 60 blocks in 1 groups; this one has 61 in 1"
    ):
        Scheduler(Serving([full()], 61).plan, Serving([full()], 60).kv)
    plan = Serving([full()], 60, max_num_batched_tokens=16).plan
    with pytest.raises(JaxkvError, match=r"2 batches of 16 tokens put 32 tokens in flight.*made for 16"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16, async_scheduling=True).check_fits(plan)


def test_a_request_cannot_be_finished_with_a_status_that_is_not_final() -> None:
    serving = Serving([full()], 60)
    serving.add("a", prompt(1, 5))
    with pytest.raises(JaxkvError, match="cannot end with the status RUNNING"):
        serving.scheduler.finish_request("a", RequestStatus.RUNNING)
    with pytest.raises(JaxkvError, match="status must be a RequestStatus, not 'done'"):
        serving.scheduler.finish_request("a", "done")  # pyright: ignore[reportArgumentType]
    with pytest.raises(JaxkvError, match="request_id must be a str, not 3"):
        serving.scheduler.abort(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(JaxkvError, match="request must be a Request, not 'a'"):
        serving.scheduler.add_request("a")  # pyright: ignore[reportArgumentType]
    assert isinstance(serving.scheduler.waiting_requests()[0], Request)


# Prefix hits


def test_a_hit_is_not_computed_again() -> None:
    serving = Serving([full()], 60)
    serving.add("a", prompt(1, 16), max_tokens=1)
    serving.run()
    serving.add("b", prompt(1, 16), max_tokens=1)
    output = serving.step()
    assert (output.num_computed.tolist(), output.num_scheduled.tolist()) == ([12], [4])
    assert serving.requests["a"].num_cached_tokens == 0
    assert serving.requests["b"].num_cached_tokens == 12
    assert serving.requests["b"].output_token_ids.tolist() == continuation(prompt(1, 16), 1)


def test_siblings_in_one_step_share_an_attention_prefix_at_once() -> None:
    serving = Serving([full()], 60, max_num_batched_tokens=64)
    serving.add("a", prompt(1, 16) + prompt(2, 4), max_tokens=1)
    serving.add("b", prompt(1, 16) + prompt(3, 4), max_tokens=1)
    output = serving.step()
    assert output.num_scheduled_tokens() == {"a": 20, "b": 4}
    assert output.num_computed.tolist() == [0, 16]


def test_siblings_in_one_step_wait_for_a_recurrent_state_and_nobody_else_does() -> None:
    serving = Serving([full(), mamba()], 80, max_num_batched_tokens=64)
    serving.add("a", prompt(1, 17), max_tokens=2)
    serving.add("b", prompt(1, 17), max_tokens=2)
    serving.add("c", prompt(9, 5), max_tokens=2)
    first = serving.step()
    assert set(first.num_scheduled_tokens()) == {"a", "c"}
    second = serving.step()
    assert "b" in second.num_scheduled_tokens()
    serving.run()
    assert serving.requests["b"].num_cached_tokens == 16


def test_chunks_of_recurrent_models_end_where_a_resend_can_hit() -> None:
    serving = Serving([full(), mamba()], 80, max_num_batched_tokens=64)
    serving.add("a", prompt(1, 30), max_tokens=1)
    assert [o.num_scheduled.tolist() for o in serving.run()] == [[28], [2]]
    serving.add("b", prompt(1, 30), max_tokens=1)
    assert serving.step().num_computed.tolist() == [28]


def test_the_second_sharer_of_a_prefix_stops_where_it_branches_and_the_third_hits_there() -> None:
    serving = Serving([full(), mamba()], 80, max_num_batched_tokens=64)
    shared = prompt(1, 20)
    chunks = {}
    for name, seed in (("a", 2), ("b", 3), ("c", 4)):
        serving.add(name, shared + prompt(seed, 11), max_tokens=1)
        chunks[name] = [o.num_scheduled.tolist()[0] for o in serving.run()]
    assert chunks == {"a": [28, 3], "b": [20, 8, 3], "c": [8, 3]}
    assert serving.requests["c"].num_cached_tokens == 20


# Counters


def test_counters_follow_the_requests() -> None:
    serving = Serving([full()], 60, max_num_seqs=1)
    serving.add("a", prompt(1, 5), max_tokens=3)
    serving.add("b", prompt(2, 6), max_tokens=1)
    serving.run()
    assert serving.scheduler.stats._asdict() == {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "num_preemptions": 0,
        "num_requests_finished": 2,
        "prompt_tokens": 11,
        "generation_tokens": 4,
        "spec_decode_num_draft_tokens": 0,
        "spec_decode_num_accepted_tokens": 0,
    }
