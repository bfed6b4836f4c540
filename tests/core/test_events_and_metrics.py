from typing import Any

import numpy as np
import pytest

from jaxkv.errors import JaxkvError
from jaxkv.events import AllBlocksCleared, BlockRemoved, BlockStored
from jaxkv.metrics import Residency
from tests.core.builders import Driver, full, make_cache, mamba, seq, take_away, window

EVENTS: dict[str, Any] = {"enable_kv_cache_events": True}


def test_stored_events_chain_blocks_by_group() -> None:
    driver = Driver(make_cache([full(), window(8), window(8)], options=EVENTS))
    request = driver.run(seq(1, 9), lora_name="x")
    driver.decode(request, seq(2, 3))
    events = [e for e in driver.cache.take_events() if isinstance(e, BlockStored)]
    hashes = request.block_hashes(driver.cache.hasher)
    assert [e.group_idx for e in events] == [0, 1, 2] * 2
    first, last = events[0], events[-1]
    assert (first.block_hashes, first.parent_block_hash) == (tuple(hashes[:2]), None)
    assert (last.block_hashes, last.parent_block_hash) == ((hashes[2],), hashes[1])
    assert first.token_ids == tuple(seq(1, 8))
    assert last.token_ids == tuple(seq(1, 9)[8:] + seq(2, 3))
    assert (first.kv_cache_spec_kind, first.kv_cache_spec_sliding_window) == ("full", None)
    assert (last.kv_cache_spec_kind, last.kv_cache_spec_sliding_window) == ("sliding_window", 8)
    assert {(e.block_size, e.lora_name) for e in events} == {(4, "x")}
    assert driver.cache.take_events() == []


def test_a_block_that_decoding_fills_is_reported_in_that_step() -> None:
    cache = make_cache([full(), window(8)], options=EVENTS)
    request = Driver(cache).run(seq(1, 9))
    cache.take_events()
    row = np.array([cache.row_of(request.request_id)])
    for num_tokens in range(10, 14):
        request.append_tokens([num_tokens])
        cache.new_step_starts()
        assert cache.allocate_decodes(row, np.array([num_tokens])).num_done == 1
        request.num_computed_tokens = num_tokens
        stored = [e for e in cache.take_events() if isinstance(e, BlockStored)]
        # Of blocks of 4 tokens the third is full with the twelfth token.
        expected = [0, 1] if num_tokens == 12 else []
        assert [e.group_idx for e in stored] == expected, num_tokens
        assert all(e.block_hashes == (request.block_hashes(cache.hasher)[2],) for e in stored)


def test_what_was_stored_and_not_removed_is_what_can_be_hit() -> None:
    cache = make_cache([full(), window(8), mamba()], num_blocks=60, options=EVENTS)
    driver = Driver(cache)
    known: dict[int, set[bytes]] = {group: set() for group in range(3)}
    for number in range(12):
        driver.serve(seq(number % 5, 10 + 3 * number), chunk=16)
        for event in cache.take_events():
            if isinstance(event, BlockStored):
                known[event.group_idx].update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                known[event.group_idx].difference_update(event.block_hashes)
        assert known == {group: set(cache.managers[group].index.units) for group in range(3)}


def test_a_duplicate_that_goes_is_not_reported_as_removed() -> None:
    cache = make_cache([full()], options=EVENTS)
    driver = Driver(cache)
    requests = [driver.request(seq(1, 9)) for _ in range(2)]
    for request in requests:
        cache.allocate_slots(request, 9)
    for request in requests:
        cache.free(request)
    cache.take_events()
    take_away(cache, len(cache.pool.plain_ids()) + 2)
    assert cache.take_events() == []
    assert driver.hit(seq(1, 9)) == 8
    take_away(cache, len(cache.pool.plain_ids()) + 2)
    removed = cache.take_events()
    assert {h for e in removed if isinstance(e, BlockRemoved) for h in e.block_hashes} == set(
        requests[0].block_hashes(cache.hasher)
    )


def test_a_reset_is_one_event() -> None:
    driver = Driver(make_cache([full()], options=EVENTS))
    driver.serve(seq(1, 9))
    assert driver.cache.reset_prefix_cache()
    events = driver.cache.take_events()
    assert [type(e) for e in events] == [BlockStored, AllBlocksCleared]


def test_no_events_unless_asked_for() -> None:
    driver = Driver(make_cache([full()]))
    driver.serve(seq(1, 9))
    assert driver.cache.take_events() == []


def test_counters_are_in_tokens_and_count_admissions_once() -> None:
    driver = Driver(make_cache([full(), mamba()]))
    driver.serve(seq(1, 30))
    for _ in range(3):
        driver.look_up(seq(1, 30))
    driver.serve(seq(1, 30))
    driver.serve(seq(1, 20) + seq(2, 9))
    driver.serve(seq(3, 3))
    counters = driver.cache.prefix_cache_stats.counters()
    assert counters["prefix_cache_requests"] == 4
    assert counters["prefix_cache_queries"] == 30 + 30 + 29 + 3
    assert counters["prefix_cache_hits"] == 28
    assert counters["prefix_cache_lost_tokens_group_1"] == 20
    assert counters["prefix_cache_too_short"] == 1


def test_residency_follows_sampled_units_from_caching_to_eviction() -> None:
    cache = make_cache([full()], num_blocks=10, options={"residency_sampling": 1.0})
    driver = Driver(cache)
    driver.serve(seq(1, 5))
    born = cache.clock.step - 1
    for _ in range(2):
        cache.new_step_starts()
    request = driver.request(seq(1, 5))
    cache.allocate_slots(request, 1, hit=cache.get_computed_blocks(request))
    used = cache.clock.step
    cache.free(request)
    for _ in range(4):
        cache.new_step_starts()
    take_away(cache, 9)
    assert cache.take_residency() == [
        Residency(lifetime=cache.clock.step - born, idle=4, reuse_gaps=(used - born,))
    ]
    assert cache.take_residency() == []


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_a_sampling_rate_outside_0_and_1_is_refused(rate: float) -> None:
    with pytest.raises(JaxkvError, match=str(rate)):
        make_cache([full()], options={"residency_sampling": rate})
