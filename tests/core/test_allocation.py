from typing import Any

import numpy as np
import pytest

from jaxkv.errors import JaxkvError
from jaxkv.specs import CrossAttentionSpec, ScratchSpec
from tests.core.builders import Driver, full, local, make_cache, mamba, seq, snapshot, take_away, window


def many_kinds(num_blocks: int = 100, **options: Any) -> Driver:
    return Driver(make_cache([full(), window(8), window(8), local(8), mamba()], num_blocks, options=options))


def test_a_new_request_that_does_not_fit_changes_nothing() -> None:
    driver = many_kinds(40)
    driver.serve(seq(1, 20))
    request = driver.request(seq(1, 20) + seq(2, 60))
    hit = driver.cache.get_computed_blocks(request)
    assert hit.num_tokens == 20
    before = snapshot(driver.cache)
    assert driver.cache.allocate_slots(request, 60, hit=hit) is None
    assert snapshot(driver.cache) == before


def test_the_units_of_a_hit_are_counted_as_taken() -> None:
    driver = Driver(make_cache([full()], num_blocks=6))
    driver.serve(seq(1, 20))
    request = driver.request(seq(1, 20) + seq(2, 4))
    hit = driver.cache.get_computed_blocks(request)
    # Five free blocks, all of them the hit's: the sixth is missing.
    assert (hit.num_tokens, driver.cache.num_free_blocks) == (20, 5)
    assert driver.cache.allocate_slots(request, 4, hit=hit) is None
    assert driver.hit(seq(1, 20) + seq(2, 4)) == 20


def test_no_group_loses_its_hit_to_the_new_blocks_of_another() -> None:
    driver = Driver(make_cache([full(), window(8)], num_blocks=14))
    driver.serve(seq(1, 20))
    request = driver.request(seq(1, 20) + seq(2, 8))
    hit = driver.cache.get_computed_blocks(request)
    held = hit.blocks
    assert driver.cache.allocate_slots(request, 8, hit=hit) is not None
    for group, table in enumerate(driver.cache.get_block_ids(request.request_id)):
        assert table[: len(held[group])] == held[group]
    driver.cache.check_integrity()


def test_a_stale_hit_is_refused_and_a_surviving_one_renewed() -> None:
    driver = Driver(make_cache([full()], num_blocks=12))
    driver.serve(seq(1, 20))
    request = driver.request(seq(1, 20) + seq(2, 4))
    hit = driver.cache.get_computed_blocks(request)
    take_away(driver.cache, 7)
    before = snapshot(driver.cache)
    with pytest.raises(JaxkvError, match=r"hit of 20 tokens .* only 16"):
        driver.cache.allocate_slots(request, 4, hit=hit)
    assert snapshot(driver.cache) == before
    again = driver.cache.get_computed_blocks(request)
    assert again.num_tokens == 16
    take_away(driver.cache, 7)
    assert driver.cache.allocate_slots(request, 8, hit=again) is not None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_new_tokens": -1}, "num_new_tokens.*-1"),
        ({"num_new_tokens": 0}, "at least 1"),
        ({"num_new_tokens": 1001}, "1001.*max_model_len 1000"),
        ({"num_new_tokens": 4, "num_lookahead_tokens": -2}, "num_lookahead_tokens.*-2"),
        ({"num_new_tokens": 4, "num_external_tokens": -2}, "num_external_tokens.*-2"),
        ({"num_new_tokens": 4, "num_encoder_tokens": -2}, "num_encoder_tokens.*-2"),
    ],
)
def test_bad_counts_are_refused_with_their_limits(arguments: dict[str, Any], named: str) -> None:
    driver = many_kinds()
    before = snapshot(driver.cache)
    with pytest.raises(JaxkvError, match=named):
        driver.cache.allocate_slots(driver.request(seq(1, 10)), **arguments)
    assert snapshot(driver.cache) == before


def test_calls_about_requests_without_blocks_are_refused_by_name() -> None:
    driver = many_kinds()
    request = driver.request(seq(1, 10))
    for call in (
        lambda: driver.cache.row_of(request.request_id),
        lambda: driver.cache.get_block_ids(request.request_id),
        lambda: driver.cache.cache_blocks(request, 4),
        lambda: driver.cache.remove_skipped_blocks(request, 4),
    ):
        with pytest.raises(JaxkvError, match="'r1' holds no blocks"):
            call()
    driver.cache.free(request)


def test_a_running_request_takes_no_hit() -> None:
    driver = many_kinds()
    driver.serve(seq(1, 20))
    hit = driver.look_up(seq(1, 20))
    request = driver.run(seq(1, 18))
    with pytest.raises(JaxkvError, match="already has blocks"):
        driver.cache.allocate_slots(request, 1, hit=hit)
    with pytest.raises(JaxkvError, match="already has blocks"):
        driver.cache.allocate_slots(request, 1, num_external_tokens=4)


def test_look_ahead_slots_are_given_out_up_to_the_maximum_length() -> None:
    driver = Driver(make_cache([full()], max_model_len=10))
    request = driver.request(seq(1, 8))
    driver.cache.allocate_slots(request, 8, num_lookahead_tokens=100)
    assert len(driver.cache.get_block_ids(request.request_id)[0]) == 3


def test_encoder_blocks_and_rings_are_taken_once_and_never_shared() -> None:
    cross = CrossAttentionSpec(block_size=4, num_kv_heads=1, head_size=8)
    ring = ScratchSpec(block_size=7, num_kv_heads=1, head_size=8)
    driver = Driver(make_cache([full(), cross, ring, ring], max_encoder_len=10))
    requests = [driver.request(seq(1, 20)) for _ in range(2)]
    for request in requests:
        driver.cache.allocate_slots(request, 12, num_encoder_tokens=10)
        request.num_computed_tokens = 12
        driver.cache.allocate_slots(request, 8)
    ids = [driver.cache.get_block_ids(request.request_id) for request in requests]
    assert [[len(group) for group in table] for table in ids] == [[5, 3, 1, 1]] * 2
    flat = [block for table in ids for group in table for block in group]
    assert len(set(flat)) == len(flat)
    driver.cache.check_integrity()
    for request in requests:
        driver.cache.free(request)
    assert driver.cache.num_free_blocks == 99
    assert driver.hit(seq(1, 20)) == 16


def test_rows_and_tables_grow_as_needed() -> None:
    driver = Driver(make_cache([full(), window(8)], num_blocks=2000, max_in_flight_tokens=1000))
    requests = [driver.run(seq(n, 30 * n)) for n in range(1, 9)]
    assert [driver.cache.row_of(r.request_id) for r in requests] == list(range(8))
    assert [len(driver.cache.get_block_ids(r.request_id)[0]) for r in requests] == [
        -(-30 * n // 4) for n in range(1, 9)
    ]
    driver.cache.free(requests[2])
    assert driver.cache.row_of(driver.run(seq(20, 5)).request_id) == 2


def test_resetting_the_prefix_cache_needs_an_idle_cache() -> None:
    driver = many_kinds()
    request = driver.run(seq(1, 20))
    assert driver.cache.reset_prefix_cache() is False
    driver.cache.free(request)
    assert driver.hit(seq(1, 20)) == 16
    assert driver.cache.reset_prefix_cache() is True
    assert driver.hit(seq(1, 20)) == 0
    assert len(driver.cache.pool.plain_ids()) == 99
    driver.cache.check_integrity()


def test_with_caching_off_nothing_is_shared_or_hashed() -> None:
    driver = many_kinds(enable_caching=False)
    request = driver.run(seq(1, 20))
    assert driver.hit(seq(1, 20)) == 0
    assert request._block_hashes == []
    driver.cache.free(request)
    assert len(driver.cache.pool.plain_ids()) == 99


def test_content_on_its_way_is_cached_when_it_has_arrived() -> None:
    driver = many_kinds()
    cache, request = driver.cache, driver.request(seq(1, 21))
    cache.new_step_starts()
    cache.allocate_slots(request, 0, num_external_tokens=16, delay_cache_blocks=True)
    request.num_computed_tokens = 16
    cache.new_step_starts()
    assert driver.hit(seq(1, 21)) == 0
    cache.cache_blocks(request, 16)
    cache.new_step_starts()
    assert driver.hit(seq(1, 21)) == 16
    with pytest.raises(JaxkvError, match=r"room for 16 tokens, so 17"):
        cache.cache_blocks(request, 17)
    driver.prefill(request)
    cache.free(request)
    assert driver.hit(seq(1, 21)) == 20


def test_content_that_never_arrived_is_not_cached_when_the_request_ends() -> None:
    driver = many_kinds()
    request = driver.request(seq(1, 21))
    driver.cache.allocate_slots(request, 0, num_external_tokens=16, delay_cache_blocks=True)
    driver.cache.free(request)
    assert driver.hit(seq(1, 21)) == 0
    assert driver.cache.num_free_blocks == 99


def test_external_tokens_beyond_a_window_take_no_blocks_of_it() -> None:
    driver = Driver(make_cache([full(), window(8), mamba()]))
    request = driver.request(seq(1, 41))
    driver.cache.allocate_slots(request, 1, num_external_tokens=40)
    tables = driver.cache.get_block_ids(request.request_id)
    assert [sum(block > 0 for block in table) for table in tables] == [11, 3, 1]
    assert tables[1][:8] == [0] * 8


def test_usage_counts_what_requests_hold() -> None:
    driver = Driver(make_cache([full(), window(8), window(8)], num_blocks=101))
    assert driver.cache.usage == 0
    request = driver.run(seq(1, 20))
    assert driver.cache.usage == pytest.approx(0.15)
    assert driver.cache.usage_by_group() == pytest.approx([0.05, 0.05, 0.05])
    driver.cache.free(request)
    assert driver.cache.usage == 0


def test_row_arrays_follow_a_request_through_batches_and_single_calls() -> None:
    driver = many_kinds()
    request = driver.run(seq(1, 10))
    for _ in range(5):
        request.append_tokens([1])
        driver.cache.allocate_decodes(np.array([0]), np.array([request.num_tokens]))
        request.num_computed_tokens += 1
    request.append_tokens([2, 3])
    driver.step(request, 2)
    assert driver.cache.rows.position[0] == 17
    driver.cache.check_integrity()
