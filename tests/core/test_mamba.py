from typing import Any

import numpy as np
import pytest

from jaxkv.managers import MambaManager
from tests.core.builders import Driver, full, make_cache, mamba, seq, take_away


def manager_of(driver: Driver) -> MambaManager:
    return next(m for m in driver.cache.managers if isinstance(m, MambaManager))


def states(driver: Driver, row: int, computed: int) -> tuple[int, int]:
    """Leaders that the step from `computed` tokens reads and writes."""
    units = manager_of(driver).step_units(np.array([row]), np.array([computed]))
    return int(units.read[0]), int(units.write[0])


def test_a_sequence_starts_from_zeros_and_updates_its_state_in_place() -> None:
    driver = Driver(make_cache([mamba()]))
    request = driver.request(seq(1, 20))
    driver.step(request, 2)
    read, write = states(driver, 0, 0)
    assert read == 0
    assert write > 0
    driver.step(request, 1)
    assert states(driver, 0, 2) == (write, write)


def test_a_state_at_a_boundary_is_read_and_not_written_again() -> None:
    driver = Driver(make_cache([mamba()]))
    request = driver.request(seq(1, 20))
    driver.step(request, 4)
    first = states(driver, 0, 0)[1]
    driver.step(request, 3)
    read, second = states(driver, 0, 4)
    assert read == first
    assert second != first
    driver.step(request, 1)
    assert states(driver, 0, 7) == (second, second)


def test_a_state_kept_inside_a_block_is_not_written_again() -> None:
    driver = Driver(make_cache([full(), mamba()], hash_block_size=2, options={"prefix_match_unit": 2}))
    request = driver.request(seq(1, 7))
    driver.step(request, 6)
    kept = states(driver, 0, 0)[1]
    driver.step(request, 1)
    read, write = states(driver, 0, 6)
    assert read == kept
    assert write != kept
    driver.cache.free(request)
    driver.cache.new_step_starts()
    assert driver.hit(seq(1, 7)) == 6


def test_two_requests_that_resume_from_one_state_write_to_states_of_their_own() -> None:
    driver = Driver(make_cache([full(), mamba()]))
    driver.serve(seq(1, 17))
    rows, writes = [], []
    for other in (2, 3):
        request = driver.request(seq(1, 16) + seq(other, 6))
        hit = driver.cache.get_computed_blocks(request)
        assert hit.num_tokens == 16
        driver.cache.allocate_slots(request, 3, hit=hit)
        rows.append(driver.cache.row_of(request.request_id))
        read, write = states(driver, rows[-1], 16)
        assert read == int(hit.parts[1].leaders[0])
        writes.append(write)
    assert len({*writes, read}) == 3
    assert driver.cache.pool.refs[read] == 2
    driver.cache.check_integrity()


def test_decoding_in_a_batch_hands_states_over_as_single_steps_do() -> None:
    batch, single = Driver(make_cache([full(), mamba()])), Driver(make_cache([full(), mamba()]))
    requests = [(driver, driver.run(seq(1, 6))) for driver in (batch, single)]
    for position in range(6, 30):
        for driver, request in requests:
            request.append_tokens([position])
            driver.cache.new_step_starts()
        driver, request = requests[0]
        done = driver.cache.allocate_decodes(np.array([0]), np.array([position + 1]))
        assert done.num_done == 1
        request.num_computed_tokens += 1
        single.step(requests[1][1], 1)
        assert single.cache.num_free_blocks >= batch.cache.pool.num_free
        reads = [states(driver, 0, position) for driver, _ in requests]
        assert [read > 0 for read, _ in reads] == [True, True]
        assert (reads[0][0] == reads[0][1]) == (reads[1][0] == reads[1][1]) == (position % 4 != 0)
        assert batch.cache.num_free_blocks <= single.cache.num_free_blocks
        batch.cache.check_integrity()
    for driver, request in requests:
        driver.cache.free(request)
        assert driver.hit([*seq(1, 6), *range(6, 30), 0]) == 28


def test_a_step_that_leaves_a_state_at_the_end_of_the_block_it_starts_in_gives_all_back() -> None:
    """The step from 6 to 11 tokens reads one state, leaves one at 8 and writes a third."""
    driver = Driver(make_cache([full(), mamba(num_prefill_checkpoint_blocks=1)]))
    request = driver.request(seq(1, 11))
    for num_tokens in (6, 5):
        driver.step(request, num_tokens)
        driver.cache.check_integrity()
    assert driver.cache.num_free_blocks == 99 - 3 - 3
    driver.cache.free(request)
    driver.cache.check_integrity()
    assert driver.cache.num_free_blocks == 99
    driver.cache.new_step_starts()
    assert driver.hit(seq(1, 11)) == 8


def test_periodic_retention_keeps_a_state_every_interval() -> None:
    driver = Driver(make_cache([full(), mamba()], options={"retention_interval": 8}))
    request = driver.request(seq(1, 30))
    assert list(driver.cache.checkpoint_positions(request)) == [8, 16, 24, 28]
    driver.serve(seq(1, 30))
    strong = driver.cache.pool.strong[driver.cache.pool.cached_units(1)]
    assert strong.all()
    assert [driver.hit(seq(1, n)) for n in (9, 15, 17, 27, 30)] == [8, 8, 16, 24, 28]


def test_the_end_of_an_answer_is_kept_and_its_middle_goes_first() -> None:
    cache = make_cache([full(), mamba()], num_blocks=60)
    driver = Driver(cache)
    # A chat that goes on from an answer: ends of answers are worth keeping.
    chat = driver.run(seq(3, 9))
    driver.decode(chat, seq(4, 4))
    cache.free(chat)
    driver.serve(seq(3, 9) + seq(4, 4) + seq(5, 4))
    request = driver.run(seq(1, 9))
    driver.decode(request, seq(2, 20))
    cache.free(request)
    pool = cache.pool
    kept = pool.cached_units(1)
    hashes = driver.request(seq(1, 9) + seq(2, 20)).block_hashes(cache.hasher)
    wanted = [bytes(pool.hash_of[leader]) for leader in kept if pool.strong[leader]]
    strong = {hashes.index(block_hash) + 1 for block_hash in wanted if block_hash in hashes}
    # The replay boundary of the prompt at 8 tokens, the end of the answer at 28.
    assert strong == {2, 7}
    take_away(cache, len(pool.plain_ids()) + int((~pool.strong[pool.free_units()]).sum()))
    assert driver.hit(seq(1, 9) + seq(2, 20)) == 28
    assert driver.hit(seq(1, 9) + seq(2, 10)) == 8


def test_without_state_keeping_there_is_one_state_and_no_hit() -> None:
    specs = [mamba(mamba_cache_mode="none", num_speculative_blocks=2)]
    driver = Driver(make_cache(specs, options={"enable_caching": False}))
    driver.serve(seq(1, 40), chunk=7)
    request = driver.run(seq(1, 40), chunk=7)
    assert driver.hit(seq(1, 40)) == 0
    assert driver.cache.num_free_blocks == 99 - 3
    assert len(driver.cache.get_block_ids(request.request_id)[0]) == 3


def test_speculative_states_come_with_the_first_and_go_with_the_last() -> None:
    driver = Driver(make_cache([full(), mamba(num_speculative_blocks=2)]))
    request = driver.run(seq(1, 30), chunk=8)
    table = driver.cache.get_block_ids(request.request_id)[1]
    assert [block > 0 for block in table[-4:]] == [True, True, True, True]
    assert driver.cache.num_free_blocks == 99 - 8 - 2 - 2
    driver.cache.free(request)
    assert driver.cache.num_free_blocks == 99


def test_a_state_of_several_blocks_moves_as_one() -> None:
    cache = make_cache([full(), mamba(), mamba()], blocks_per_state=3)
    driver = Driver(cache)
    assert cache.managers[1].width == 6
    request = driver.run(seq(1, 10), chunk=8)
    assert cache.num_free_blocks == 99 - 3 - 2 * 6
    ids = cache.get_block_ids(request.request_id)
    assert [[block > 0 for block in table] for table in ids[1:]] == [[False, True, True]] * 2
    cache.free(request)
    assert driver.hit(seq(1, 10)) == 8


@pytest.mark.parametrize("options", [{}, {"retention_interval": None}])
def test_a_draft_that_jumps_over_a_boundary_leaves_no_state_there(options: dict[str, Any]) -> None:
    driver = Driver(make_cache([full(), mamba()], options=options))
    request = driver.run(seq(1, 6))
    request.append_tokens([1, 2, 3, 4])
    driver.step(request, 4)
    driver.cache.free(request)
    driver.cache.new_step_starts()
    # States exist after 4 and 10 tokens; 10 is no boundary.
    assert driver.hit([*seq(1, 6), 1, 2, 3, 4, 5]) == 4


def test_a_state_cannot_be_cached_before_its_last_token_is_known() -> None:
    driver = Driver(make_cache([full(), mamba()]))
    request = driver.run(seq(1, 7))
    # The eighth token is sampled on the device: the step that computes it is scheduled, its id unknown.
    driver.cache.new_step_starts()
    driver.cache.allocate_decodes(np.array([0]), np.array([8]))
    driver.cache.new_step_starts()
    assert driver.hit([*seq(1, 7), 5, 6]) == 4
    request.append_tokens([5])
    assert driver.hit([*seq(1, 7), 5, 6]) == 8
