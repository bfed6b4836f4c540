"""What vLLM 0.33 gets wrong and this cache must not: each case was reproduced there."""

from typing import Any

import pytest

from jaxkv.events import BlockStored
from jaxkv.specs import RequestLimits, ScratchSpec
from tests.core.builders import Driver, full, local, make_cache, mamba, seq, take_away, window

DENSE: dict[str, Any] = {"retention_interval": None}


@pytest.mark.parametrize("length", range(33, 257, 7))
def test_chunks_end_where_hits_can_begin_with_unequal_blocks(length: int) -> None:
    driver = Driver(make_cache([full(32), window(64, 16), mamba(16)]))
    driver.serve(seq(1, length))
    assert driver.hit(seq(1, length)) == (length - 1) // 32 * 32


def test_sparse_retention_keeps_the_next_lower_boundary_of_windows() -> None:
    cache = make_cache([full(), window(8)])
    driver = Driver(cache)
    driver.serve(seq(1, 41))
    plain = len(cache.pool.plain_ids())
    weak = cache.pool.free_units()
    num_weak = int((~cache.pool.strong[weak]).sum())
    take_away(cache, plain + num_weak)
    assert driver.hit(seq(1, 41)) == 40
    # The last blocks of both groups go first; vLLM's hit falls from 40 to 0 with the first one.
    take_away(cache, plain + num_weak + 1)
    assert driver.hit(seq(1, 41)) == 36


def test_a_chat_of_eight_turns_computes_only_what_is_new_under_sparse_retention() -> None:
    driver = Driver(make_cache([full(), window(8), mamba()], num_blocks=1000))
    history: list[int] = []
    for turn in range(8):
        history += seq(10 + turn, 30)
        request = driver.request(history)
        assert driver.cache.get_computed_blocks(request).num_tokens >= (len(history) - 30) // 4 * 4
        driver.prefill(request)
        answer = seq(50 + turn, 10)
        driver.decode(request, answer)
        history += answer
        driver.cache.free(request)


def test_a_shared_prefix_is_missed_once_by_states_and_never_by_windows() -> None:
    states, windows = Driver(make_cache([full(), mamba()])), Driver(make_cache([full(), window(8)]))
    for driver, hits in ((states, [0, 0, 20, 20]), (windows, [0, 20, 20, 20])):
        for number, expected in enumerate(hits):
            tokens = seq(1, 20) + seq(2 + number, 12)
            assert driver.hit(tokens) == expected
            driver.serve(tokens)


def test_dense_states_exist_inside_a_chunk_where_the_kernel_can_leave_them() -> None:
    spec = mamba(num_prefill_checkpoint_blocks=2)
    cache = make_cache([full(), spec], options={"retention_interval": 8})
    driver = Driver(cache)
    request = driver.request(seq(1, 20))
    driver.step(request, 20)
    assert [block > 0 for block in cache.get_block_ids(request.request_id)[1]] == [
        False,
        True,
        False,
        True,
        True,
    ]
    cache.new_step_starts()
    assert driver.hit(seq(1, 12) + seq(2, 5)) == 8
    assert driver.hit(seq(1, 20)) == 16


def test_hits_fall_on_any_length_that_every_group_can_serve() -> None:
    # 12, 8 and 4: whole blocks of the first two only meet at 24. Copying part of a block serves any 4.
    specs = [full(12), window(20, 8), window(9, 4)]
    driver = Driver(make_cache(specs, options=DENSE | {"prefix_match_unit": 4}))
    driver.serve(seq(1, 45))
    for length in range(5, 46):
        assert driver.hit(seq(1, length)) == (length - 1) // 4 * 4


def test_a_ring_and_a_window_of_one_do_not_coarsen_the_hits() -> None:
    ring = ScratchSpec(block_size=7, num_kv_heads=1, head_size=8)
    driver = Driver(make_cache([full(4), ring, window(1, 16)], options=DENSE))
    assert driver.cache.chunk_alignment == 4
    driver.serve(seq(1, 41))
    assert driver.hit(seq(1, 41)) == 40
    assert driver.hit(seq(1, 31)) == 28


def test_local_layers_with_unequal_blocks_work() -> None:
    driver = Driver(make_cache([full(8), local(12, 4)], options=DENSE))
    driver.serve(seq(1, 50))
    assert driver.hit(seq(1, 50)) == 48
    assert driver.hit(seq(1, 30)) == 24


def test_a_hit_is_never_too_long_where_chunks_are_no_multiple_of_the_block() -> None:
    cache = make_cache([full(4), local(6, 4)], options=DENSE)
    driver = Driver(cache)
    request = driver.run(seq(1, 26))
    hashes = request.block_hashes(cache.hasher)
    # 20 needs the tokens from 18 on, which are in block 4 together with the end of the chunk before.
    block = cache.managers[1].index.units[hashes[4]]
    cache.free(request)
    cache.pool.forget(1, cache.pool.cached_units(1)[cache.pool.cached_units(1) == block])
    assert driver.hit(seq(1, 22)) == 16
    # 24 is the end of a chunk: nothing of it is needed.
    assert driver.hit(seq(1, 26)) == 24


def test_a_block_that_a_local_hit_began_in_is_not_taken_for_a_whole_one() -> None:
    cache = make_cache([full(4), local(4, 8)], options=DENSE)
    driver = Driver(cache)
    driver.serve(seq(1, 5))
    # The hit of 4 needs no local token, so local block 0 of the next request lacks its first half.
    request = driver.run(seq(1, 12))
    assert request.num_computed_tokens == 12
    hashes = request.block_hashes(cache.hasher)
    assert hashes[1] not in cache.managers[1].index.units


def test_a_window_of_one_needs_nothing_before() -> None:
    driver = Driver(make_cache([full(), window(1)], options=DENSE))
    driver.serve(seq(1, 40))
    hit = driver.look_up(seq(1, 40))
    assert hit.num_tokens == 36
    assert hit.blocks[1] == [0] * 9


def test_a_window_costs_at_most_what_full_attention_does() -> None:
    limits = RequestLimits(max_model_len=64, max_in_flight_tokens=64)
    assert window(64, 1).max_blocks_per_request(limits) == 64


def test_every_event_names_blocks_that_are_cached() -> None:
    cache = make_cache([full(), window(8), mamba()], options={"enable_kv_cache_events": True})
    driver = Driver(cache)
    driver.serve(seq(1, 41), chunk=7)
    for event in cache.take_events():
        assert isinstance(event, BlockStored)
        assert event.block_hashes
        index = next(m.index.units for m in cache.managers if event.group_idx in m.group_ids)
        assert all(block_hash in index for block_hash in event.block_hashes)
