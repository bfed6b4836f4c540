"""What a look-up says, and the three coordinators."""

from typing import Any

import pytest

from jaxkv.coordinator import HybridCoordinator, NoPrefixCacheCoordinator, UnitaryCoordinator
from jaxkv.specs import ScratchSpec
from tests.core.builders import Driver, full, local, make_cache, mamba, seq, snapshot, take_away, window

DENSE: dict[str, Any] = {"retention_interval": None}


@pytest.mark.parametrize(
    ("specs", "options", "kind"),
    [
        ([full(), window(8)], {"enable_caching": False}, NoPrefixCacheCoordinator),
        ([ScratchSpec(block_size=4, num_kv_heads=1, head_size=8)], {}, NoPrefixCacheCoordinator),
        ([full()], {}, UnitaryCoordinator),
        ([window(8), window(8)], {}, UnitaryCoordinator),
        ([full(), ScratchSpec(block_size=4, num_kv_heads=1, head_size=8)], {}, UnitaryCoordinator),
        ([full(), window(8)], {}, HybridCoordinator),
    ],
)
def test_the_simplest_coordinator_that_serves_is_chosen(
    specs: list, options: dict[str, Any], kind: type
) -> None:
    assert type(make_cache(specs, options=options).coordinator) is kind


@pytest.mark.parametrize("specs", [[full()], [full(), window(8), local(8), mamba()]])
def test_a_look_up_changes_nothing(specs: list) -> None:
    driver = Driver(make_cache(specs))
    driver.serve(seq(1, 40))
    driver.run(seq(2, 30))
    before = snapshot(driver.cache)
    for tokens in (seq(1, 40), seq(2, 50), seq(3, 7), [5]):
        driver.look_up(tokens)
    assert snapshot(driver.cache) == before


def test_a_hit_says_who_limited_it_and_by_how_much() -> None:
    driver = Driver(make_cache([full(), window(8), mamba()]))
    driver.serve(seq(1, 40), chunk=1000)
    hit = driver.look_up(seq(1, 30) + seq(2, 9))
    assert hit.tokens_by_group == (28, 28, 0)
    assert (hit.num_tokens, hit.limited_by, hit.lost_tokens, hit.branch_point) == (0, 2, 28, 28)
    complete = driver.look_up(seq(1, 40))
    assert (complete.num_tokens, complete.limited_by, complete.lost_tokens) == (36, None, 0)


def test_full_attention_can_be_the_one_that_limits() -> None:
    cache = make_cache([full(), window(8)], options=DENSE)
    driver = Driver(cache)
    driver.serve(seq(1, 41))
    hashes = driver.request(seq(1, 41)).block_hashes(cache.hasher)
    leader = cache.managers[0].index.units[hashes[6]]
    cache.pool.forget(0, cache.pool.cached_units(0)[cache.pool.cached_units(0) == leader])
    hit = driver.look_up(seq(1, 41))
    assert (hit.num_tokens, hit.limited_by, hit.lost_tokens) == (24, 0, 16)
    # Full attention keeps every block anyway: nothing is to be gained by a boundary there.
    assert hit.branch_point == 0


def test_what_needs_no_block_is_no_loss() -> None:
    driver = Driver(make_cache([full(), local(8), window(1)]))
    hit = driver.look_up(seq(1, 30))
    assert (hit.num_tokens, hit.lost_tokens, hit.limited_by, hit.tokens_by_group) == (0, 0, None, (0, 0, 0))


def test_the_answer_is_a_fixed_point_of_all_kinds() -> None:
    # The states alone would serve 32, the window then 20, the states then 16, and everybody 16.
    cache = make_cache([full(), window(8), mamba()], options={"retention_interval": 16})
    driver = Driver(cache)
    driver.serve(seq(1, 41))
    index = cache.managers[1].index.units
    hashes = driver.request(seq(1, 41)).block_hashes(cache.hasher)
    for block in (7, 9):
        leader = index[hashes[block]]
        cache.pool.forget(1, cache.pool.cached_units(1)[cache.pool.cached_units(1) == leader])
    assert driver.hit(seq(1, 41)) == 16


def test_ids_of_siblings_are_in_the_order_of_their_groups() -> None:
    cache = make_cache([window(8), full(), window(8)])
    driver = Driver(cache)
    request = driver.run(seq(1, 9))
    ids = cache.get_block_ids(request.request_id)
    assert [manager.group_ids for manager in cache.managers] == [(0, 2), (1,)]
    assert ids[0] != ids[2]
    cache.free(request)
    hit = driver.look_up(seq(1, 9))
    assert hit.blocks == [ids[0][:2], ids[1][:2], ids[2][:2]]


def test_tenants_with_different_salts_do_not_see_each_other() -> None:
    driver = Driver(make_cache([full(), window(8)]))
    driver.serve(seq(1, 20), cache_salt="a")
    for fields, hit in (
        ({"cache_salt": "a"}, 16),
        ({"cache_salt": "b"}, 0),
        ({}, 0),
        ({"lora_name": "a"}, 0),
    ):
        request = driver.request(seq(1, 20), **fields)
        assert driver.cache.get_computed_blocks(request).num_tokens == hit


def test_processes_agree_on_hits_through_the_fast_hash_too() -> None:
    driver = Driver(make_cache([full(), mamba()], options={"hash_algo": "mix128"}))
    driver.serve(seq(1, 20))
    assert driver.hit(seq(1, 20)) == 16
    assert driver.hit(seq(2, 20)) == 0


def test_evicting_from_the_end_shortens_hits_block_by_block() -> None:
    cache = make_cache([full(), window(8)], options=DENSE)
    driver = Driver(cache)
    driver.serve(seq(1, 41))
    hits = []
    take_away(cache, len(cache.pool.plain_ids()))
    for _ in range(20):
        hits.append(driver.hit(seq(1, 41)))
        cache.pool.take(0, len(cache.pool.plain_ids()) + 1)
    # Both groups lose the same positions together: two blocks for each four tokens.
    assert hits == [40, *(n for n in range(36, 0, -4) for _ in range(2)), 0]


def test_hits_reach_the_ends_of_local_chunks_that_are_no_ends_of_blocks() -> None:
    # Blocks of 4 and 16 tokens, chunks of 8: a hit of 8 needs the first two small blocks, and no large one.
    cache = make_cache([full(4), local(8, 16)])
    driver = Driver(cache)
    driver.serve(seq(1, 41))
    assert cache.plan.scheduler_block_size == 16
    assert cache.plan.hit_alignment == cache.chunk_alignment == 8
    assert [driver.hit(seq(1, n)) for n in (9, 16, 17, 24, 25)] == [8, 8, 16, 16, 24]
