"""Two steps in flight: a step is scheduled before the tokens of the one before it are known."""

from typing import Any

import numpy as np
import pytest

from jaxkv.errors import JaxkvError
from jaxkv.request_table import NO_TOKEN
from tests.scheduling.serving import Serving, continuation, full, window


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 1000 + 7 * i) % 5000 for i in range(length)]


def overlapping(num_blocks: int, **options: Any) -> Serving:
    return Serving(
        [full(), window(8)], num_blocks, max_num_batched_tokens=16, async_scheduling=True, **options
    )


def test_the_next_step_is_scheduled_with_tokens_that_are_still_on_the_device() -> None:
    serving = overlapping(60)
    serving.add("a", prompt(1, 5), max_tokens=5)
    first = serving.schedule()
    second = serving.schedule()
    assert second.num_scheduled_tokens() == {"a": 1}
    arrays = second.token_arrays(serving.scheduler.table)
    assert arrays.tokens.tolist() == [NO_TOKEN]
    assert arrays.on_device.tolist() == [True]
    assert arrays.positions.tolist() == [5]
    assert second.carried(first, arrays).tolist() == [0]
    serving.update()
    serving.update()
    assert serving.requests["a"].output_token_ids.tolist() == continuation(prompt(1, 5), 2)


def test_carried_tokens_are_found_in_the_order_of_the_step_before() -> None:
    serving = overlapping(60)
    serving.add("a", prompt(1, 5), max_tokens=5)
    serving.add("long", prompt(2, 20), max_tokens=5)
    first = serving.schedule()
    assert first.samples.tolist() == [True, False]
    second = serving.schedule()
    arrays = second.token_arrays(serving.scheduler.table)
    carried = second.carried(first, arrays)
    assert second.num_scheduled_tokens() == {"a": 1, "long": 9}
    assert carried.tolist() == [0] + [-1] * 9
    serving.update()
    third = serving.schedule()
    arrays = third.token_arrays(serving.scheduler.table)
    assert third.carried(second, arrays).tolist() == [0, 1]
    serving.drain()


def test_no_step_is_scheduled_past_the_length_limit() -> None:
    serving = overlapping(60)
    serving.add("a", prompt(1, 5), max_tokens=2)
    serving.schedule()
    assert len(serving.schedule()) == 1
    serving.update()
    assert len(serving.schedule()) == 0  # its last token is on its way
    serving.drain()
    assert serving.requests["a"].output_token_ids.tolist() == continuation(prompt(1, 5), 2)


def test_a_token_after_the_end_token_is_dropped_and_blocks_stay_until_its_step_is_done() -> None:
    end = continuation(prompt(1, 5), 1)[0]
    serving = overlapping(60, enable_caching=False)
    serving.add("a", prompt(1, 5), max_tokens=9, end_token_ids=[end])
    serving.schedule()
    serving.schedule()
    assert [f.reason for f in serving.update().finished] == ["stop"]
    assert serving.kv.num_free_blocks < 59
    assert len(serving.update()) == 0
    assert serving.kv.num_free_blocks == 59
    assert serving.requests["a"].output_token_ids.tolist() == [end]


def test_an_id_is_free_again_only_when_its_blocks_are() -> None:
    serving = overlapping(60)
    serving.add("a", prompt(1, 5), max_tokens=9)
    serving.schedule()
    serving.scheduler.abort("a")
    with pytest.raises(JaxkvError, match="request id 'a' is already in use"):
        serving.add("a", prompt(1, 5))
    serving.drain()
    serving.add("a", prompt(1, 5), max_tokens=1)
    serving.run()


def test_a_preempted_request_gets_the_token_that_was_on_its_way() -> None:
    serving = overlapping(14, max_num_seqs=3)
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        serving.add(name, prompt(seed, 11), max_tokens=9)
    serving.run()
    assert serving.scheduler.stats.num_preemptions > 0
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        assert serving.requests[name].output_token_ids.tolist() == continuation(prompt(seed, 11), 9)
    serving.kv.check_integrity()


def test_overlapping_steps_give_the_same_tokens_as_steps_one_by_one() -> None:
    answers = []
    for overlap in (False, True):
        serving = Serving([full(), window(8)], 60, max_num_batched_tokens=16, async_scheduling=overlap)
        rng = np.random.default_rng(7)
        for i in range(12):
            serving.add(f"r{i}", rng.integers(0, 50, int(rng.integers(1, 30))).tolist(), max_tokens=10)
        serving.run()
        answers.append({name: r.output_token_ids.tolist() for name, r in serving.requests.items()})
    assert answers[0] == answers[1]
