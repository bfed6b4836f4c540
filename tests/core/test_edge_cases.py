"""The cases that decide whether a cache is right, with blocks of 4 and tokens 0..n-1 unless stated otherwise.

Most are where vLLM 0.33 draws the line too; where this cache finds more, the test says why that is right.
"""

from typing import Any

import pytest

from jaxkv.managers import MambaManager
from tests.core.builders import Driver, full, local, make_cache, mamba, seq, take_away, window

DENSE: dict[str, Any] = {"retention_interval": None}


def test_a_prompt_of_16_resent_hits_12() -> None:
    driver = Driver(make_cache([full(), window(8)]))
    driver.serve(seq(1, 16))
    assert driver.hit(seq(1, 16)) == 12


def test_a_prompt_of_16_then_17_hits_16_while_the_window_is_still_there() -> None:
    driver = Driver(make_cache([full(), window(8), mamba()]))
    driver.serve(seq(1, 16))
    assert driver.hit(seq(1, 17)) == 16


def test_a_window_of_8_serves_two_sharers_of_the_first_20_of_40() -> None:
    driver = Driver(make_cache([full(), window(8)]))
    driver.serve(seq(1, 40))
    # vLLM misses the first sharer: it does not index blocks that sparse retention does not want. They are
    # weak here, so they are found until their room is needed.
    assert driver.hit(seq(1, 20) + seq(2, 10)) == 20


def test_weak_window_blocks_go_first_and_the_junction_is_kept_from_then_on() -> None:
    cache = make_cache([full(), window(8)], num_blocks=41)
    driver = Driver(cache)
    driver.serve(seq(1, 40))
    sharer = seq(1, 20) + seq(2, 10)
    # Seven blocks of the window are unwanted, and the one of full attention beyond the prompt's boundary.
    take_away(cache, 20 + 8)
    hit = driver.look_up(sharer)
    assert (hit.num_tokens, hit.lost_tokens, hit.limited_by, hit.branch_point) == (0, 20, 1, 20)
    driver.serve(sharer)
    take_away(cache, 11)
    assert driver.hit(seq(1, 20) + seq(3, 10)) == 20


@pytest.mark.parametrize("options", [{}, DENSE])
def test_generated_tokens_are_found_whatever_the_retention(options: dict[str, Any]) -> None:
    driver = Driver(make_cache([full(), window(8), mamba()], options=options))
    request = driver.run(seq(1, 41))
    driver.decode(request, seq(2, 21))
    driver.cache.free(request)
    # vLLM's sparse retention finds 40 of them: it keeps nothing at the end of an answer.
    assert driver.hit(seq(1, 41) + seq(2, 21) + seq(3, 5)) == 60


def test_a_window_of_8_after_a_hit_of_28_holds_two_blocks() -> None:
    driver = Driver(make_cache([full(), window(8)]))
    driver.serve(seq(1, 29))
    request = driver.run(seq(1, 29), chunk=1)
    table = driver.cache.get_block_ids(request.request_id)[1]
    assert [block > 0 for block in table] == [False] * 5 + [True] * 3
    hit = driver.look_up(seq(1, 29))
    assert hit.num_tokens == 28
    assert [block > 0 for block in hit.blocks[1]] == [False] * 5 + [True] * 2


def test_a_run_from_the_start_may_be_shorter_than_the_window() -> None:
    driver = Driver(make_cache([full(), window(100)]))
    driver.serve(seq(1, 17))
    assert driver.hit(seq(1, 17)) == 16


def test_siblings_lose_a_block_together_and_both_fall_back() -> None:
    cache = make_cache([window(8), window(8)], options=DENSE)
    driver = Driver(cache)
    driver.serve(seq(1, 41))
    assert driver.hit(seq(1, 41)) == 40
    manager = cache.managers[0]
    hashes = driver.request(seq(1, 41)).block_hashes(cache.hasher)
    cache.pool.forget(0, manager.finder(hashes).part(40).leaders[:1])
    # Blocks 8 and 9 serve 40; without block 8 the next lower end is that of block 7.
    assert driver.hit(seq(1, 41)) == 32
    cache.check_integrity()


@pytest.mark.parametrize(("computed", "nulls"), [(16, 2), (30, 5)])
def test_a_window_of_8_leaves_whole_blocks_behind(computed: int, nulls: int) -> None:
    driver = Driver(make_cache([full(), window(8)]))
    request = driver.request(seq(1, 40))
    driver.step(request, computed)
    driver.step(request, 1)
    table = driver.cache.get_block_ids(request.request_id)[1]
    assert table[:nulls] == [0] * nulls
    assert 0 not in table[nulls:]


def test_a_refused_allocation_still_frees_what_the_window_left() -> None:
    cache = make_cache([full(), window(4)], num_blocks=9)
    driver = Driver(cache)
    request = driver.request(seq(1, 60))
    driver.step(request, 16)
    assert cache.num_free_blocks == 0
    before = cache.get_block_ids(request.request_id)[0]
    assert driver.step(request, 30) is None
    assert cache.num_free_blocks == 3
    assert cache.get_block_ids(request.request_id)[0] == before


@pytest.mark.parametrize(("length", "hit"), [(26, 24), (25, 24), (24, 20)])
def test_local_chunks_of_8_need_nothing_at_their_ends(length: int, hit: int) -> None:
    driver = Driver(make_cache([full(), local(8)], options=DENSE))
    driver.serve(seq(1, 26))
    assert driver.hit(seq(1, length)) == hit


def test_a_recurrent_prompt_of_30_ends_its_chunk_at_28() -> None:
    cache = make_cache([full(), mamba()])
    driver = Driver(cache)
    request = driver.request(seq(1, 30))
    hit = cache.get_computed_blocks(request)
    assert list(cache.checkpoint_positions(request, hit)) == [28]
    driver.step(request, 28)
    table = cache.get_block_ids(request.request_id)[1]
    assert table[:6] == [0] * 6
    assert table[6] > 0
    assert len(table) == 7


def test_two_requests_of_one_step_share_attention_at_once_and_states_a_step_later() -> None:
    attention = Driver(make_cache([full()]))
    attention.cache.new_step_starts()
    attention.cache.allocate_slots(attention.request(seq(1, 20)), 20)
    assert attention.hit(seq(1, 20)) == 16
    states = Driver(make_cache([full(), mamba()]))
    first = states.request(seq(1, 20))
    states.step(first, 16)
    second = states.look_up(seq(1, 20))
    assert (second.num_tokens, second.pending) == (0, True)
    states.cache.new_step_starts()
    second = states.look_up(seq(1, 20))
    assert (second.num_tokens, second.pending) == (16, False)


def test_of_two_blocks_with_one_hash_both_stay_and_the_first_is_found() -> None:
    cache = make_cache([full()])
    driver = Driver(cache)
    first, second = driver.request(seq(1, 9)), driver.request(seq(1, 9))
    for request in (first, second):
        cache.allocate_slots(request, 9)
    ids = [cache.get_block_ids(request.request_id)[0] for request in (first, second)]
    assert not set(ids[0]) & set(ids[1])
    assert driver.look_up(seq(1, 9)).blocks[0] == ids[0][:2]
    cache.free(first)
    cache.pool.forget(0, cache.pool.free_units())
    assert driver.look_up(seq(1, 9)).blocks[0] == ids[1][:2]
    cache.check_integrity()


def test_freed_blocks_without_content_are_reused_first_and_tails_go_before_heads() -> None:
    cache = make_cache([full()], num_blocks=11)
    driver = Driver(cache)
    driver.serve(seq(1, 18))
    # Four blocks are cached, the fifth was not full: it is plain again, with the five never used.
    assert len(cache.pool.plain_ids()) == 6
    take_away(cache, 6)
    assert driver.hit(seq(1, 18)) == 16
    for left in (12, 8, 4, 0):
        cache.pool.take(0, len(cache.pool.plain_ids()) + 1)
        assert driver.hit(seq(1, 18)) == left


def test_a_request_preempted_at_10_and_7_tokens_resumes_with_16() -> None:
    driver = Driver(make_cache([full(), window(8), mamba()]))
    request = driver.run(seq(1, 10))
    driver.decode(request, seq(2, 7))
    driver.cache.free(request)
    request.num_preemptions += 1
    request.num_computed_tokens = 0
    driver.prefill(request)
    stats = driver.cache.prefix_cache_stats
    assert (stats.requests, stats.hits) == (1, 0)
    assert (stats.preempted_requests, stats.preempted_hits) == (1, 16)


@pytest.mark.parametrize(("ahead", "hit"), [(0, 36), (1, 40)])
def test_eagle_drops_a_block_unless_its_hash_covers_the_next_token(ahead: int, hit: int) -> None:
    options = {"num_hash_lookahead_tokens": ahead}
    driver = Driver(make_cache([full()], eagle=[0], options=options))
    driver.serve(seq(1, 41))
    assert driver.hit(seq(1, 41)) == hit


def test_a_state_is_handed_over_when_its_block_is_full() -> None:
    cache = make_cache([mamba()])
    driver = Driver(cache)
    manager = cache.managers[0]
    assert isinstance(manager, MambaManager)
    request = driver.run(seq(1, 7), chunk=4)
    assert cache.num_free_blocks == 99 - 2
    driver.decode(request, [1])
    assert cache.num_free_blocks == 99 - 1
    assert [b > 0 for b in cache.get_block_ids(request.request_id)[0]] == [False, True]
    driver.decode(request, [2])
    assert [b > 0 for b in cache.get_block_ids(request.request_id)[0]] == [False, True, True]
    driver.decode(request, [3])
    assert [b > 0 for b in cache.get_block_ids(request.request_id)[0]] == [False, False, True]
