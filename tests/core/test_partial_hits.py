"""Hits that end inside a block: the block is copied before the request writes the rest of it."""

import numpy as np
import pytest

from jaxkv.errors import JaxkvError
from tests.core.builders import Driver, full, local, make_cache, mamba, seq, take_away, window


def fine(specs, num_blocks: int = 100, unit: int = 4, **plan) -> Driver:
    cache = make_cache(specs, num_blocks, hash_block_size=unit, options={"prefix_match_unit": unit}, **plan)
    return Driver(cache)


def test_a_prompt_that_ends_inside_a_block_hits_up_to_its_last_hash() -> None:
    driver = fine([full(16)])
    driver.serve(seq(1, 30))
    assert driver.hit(seq(1, 30)) == 28
    assert driver.hit(seq(1, 23) + seq(2, 9)) == 20
    assert driver.hit(seq(1, 16)) == 12


def test_the_block_is_copied_and_its_source_held_until_the_step_has_run() -> None:
    driver = fine([full(16), window(20, 16)])
    driver.serve(seq(1, 30))
    cache = driver.cache
    request = driver.request(seq(1, 25) + seq(2, 10))
    hit = cache.get_computed_blocks(request)
    assert hit.num_tokens == 24
    sources = [part.copy_from for part in hit.parts]
    assert all(source > 0 for source in sources)
    assert cache.allocate_slots(request, 11, hit=hit) is not None
    copies = cache.take_block_copies()
    assert copies.sources.tolist() == sources
    targets = [ids[1] for ids in cache.get_block_ids(request.request_id)]
    assert copies.targets.tolist() == targets
    assert not set(targets) & set(sources)
    assert cache.pool.refs[sources].tolist() == [1, 1]
    cache.check_integrity()
    cache.new_step_starts()
    assert cache.pool.refs[sources].tolist() == [0, 0]
    cache.check_integrity()
    assert len(cache.take_block_copies().sources) == 0


def test_a_copied_block_counts_as_whole_once_it_is_full() -> None:
    driver = fine([full(16)])
    driver.serve(seq(1, 30))
    driver.serve(seq(1, 25) + seq(2, 10))
    assert driver.hit(seq(1, 25) + seq(2, 8)) == 32


def test_siblings_of_a_wide_unit_are_copied_one_by_one() -> None:
    driver = fine([window(40, 16)] * 3)
    driver.serve(seq(1, 24))
    request = driver.request(seq(1, 22))
    hit = driver.cache.get_computed_blocks(request)
    assert hit.num_tokens == 20
    driver.cache.allocate_slots(request, 2, hit=hit)
    copies = driver.cache.take_block_copies()
    assert len(set(copies.sources.tolist())) == len(set(copies.targets.tolist())) == 3
    assert copies.targets.tolist() == [ids[1] for ids in driver.cache.get_block_ids(request.request_id)]


def test_content_of_the_running_step_cannot_be_copied_yet() -> None:
    driver = fine([full(16)])
    driver.cache.new_step_starts()
    driver.cache.allocate_slots(driver.request(seq(1, 30)), 30)
    hit = driver.look_up(seq(1, 30))
    assert (hit.num_tokens, hit.pending) == (16, True)
    driver.cache.new_step_starts()
    assert driver.hit(seq(1, 30)) == 28


def test_the_copy_is_counted_when_room_is_short() -> None:
    driver = fine([full(16)], num_blocks=4)
    driver.serve(seq(1, 30))
    cache = driver.cache
    request = driver.request(seq(1, 30))
    hit = cache.get_computed_blocks(request)
    # The block before, the source and the copy: exactly the three there are.
    assert cache.allocate_slots(request, 2, hit=hit) is not None
    assert cache.num_free_blocks == 0
    cache.new_step_starts()
    assert cache.num_free_blocks == 1
    cache.free(request)
    tight = fine([full(16)], num_blocks=3)
    tight.serve(seq(1, 30))
    request = tight.request(seq(1, 30))
    assert tight.cache.allocate_slots(request, 2, hit=tight.cache.get_computed_blocks(request)) is None
    tight.cache.check_integrity()


def test_an_evicted_block_serves_no_part_any_more() -> None:
    driver = fine([full(16)], num_blocks=6)
    driver.serve(seq(1, 30))
    take_away(driver.cache, 4)
    assert driver.hit(seq(1, 30)) == 16
    take_away(driver.cache, 5)
    assert driver.hit(seq(1, 30)) == 0
    driver.cache.check_integrity()


@pytest.mark.parametrize("length", range(5, 50))
def test_kinds_with_unequal_blocks_hit_at_every_hash(length: int) -> None:
    driver = fine([full(16), window(10, 8), local(12, 12)], unit=4)
    driver.serve(seq(1, 50))
    assert driver.hit(seq(1, length)) == (length - 1) // 4 * 4


def test_states_are_kept_at_hashes_inside_their_block() -> None:
    driver = fine([full(16), mamba(16)])
    driver.serve(seq(1, 30))
    assert driver.hit(seq(1, 30)) == 28
    request = driver.request(seq(1, 30))
    hit = driver.cache.get_computed_blocks(request)
    driver.cache.allocate_slots(request, 2, hit=hit)
    manager = driver.cache.managers[1]
    row = driver.cache.row_of(request.request_id)
    held = manager.units_of(row)
    # The shared state stays as it is; the request goes on in one of its own.
    assert len(np.unique(held)) == 2
    driver.cache.check_integrity()


def test_eagle_gives_up_one_hash_and_not_a_block() -> None:
    driver = fine([full(16)], eagle=[0])
    driver.serve(seq(1, 30))
    assert driver.hit(seq(1, 30)) == 24


@pytest.mark.parametrize("spec", [full(8), window(20, 8)])
def test_a_block_that_only_proves_an_eagle_hit_need_not_be_ready_but_its_copy_must(spec) -> None:
    driver = fine([spec], eagle=[0])
    driver.cache.new_step_starts()
    driver.cache.allocate_slots(driver.request(seq(1, 8)), 8)
    # The whole block proves a hit of 4, but its first half cannot be copied before this step has run.
    hit = driver.look_up(seq(1, 9))
    assert (hit.num_tokens, hit.pending) == (0, True)
    driver.cache.new_step_starts()
    assert driver.hit(seq(1, 9)) == 4


def test_the_unit_must_be_the_hash_block_of_the_plan() -> None:
    with pytest.raises(JaxkvError, match=r"prefix_match_unit 8 .* 4 tokens"):
        make_cache([full(16)], hash_block_size=4, options={"prefix_match_unit": 8})
