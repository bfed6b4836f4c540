"""The self-check finds what it is there to find."""

from collections.abc import Callable

import pytest

from jaxkv.cache_manager import KVCacheManager
from jaxkv.integrity import IntegrityError
from tests.core.builders import Driver, full, make_cache, mamba, seq, window


def damaged(damage: Callable[[KVCacheManager], None]) -> KVCacheManager:
    driver = Driver(make_cache([full(), window(8), window(8), mamba()]))
    driver.serve(seq(1, 30))
    twins = [driver.request(seq(3, 17)) for _ in range(2)]
    for twin in twins:
        driver.cache.allocate_slots(twin, 17)
    for twin in twins:
        driver.cache.free(twin)
    driver.run(seq(2, 30))
    driver.cache.check_integrity()
    damage(driver.cache)
    return driver.cache


def lose_a_reference(cache: KVCacheManager) -> None:
    row = int(cache.rows.active()[0])
    cache.pool.holders[cache.managers[0].units_of(row)[0]] -= 1


def lose_a_free_block(cache: KVCacheManager) -> None:
    cache.pool._num_plain -= 1


def miscount(cache: KVCacheManager) -> None:
    cache.pool.num_free += 1


def give_out_twice(cache: KVCacheManager) -> None:
    cache.pool.plain_ids()[0] = cache.pool.plain_ids()[1]


def forget_a_hash(cache: KVCacheManager) -> None:
    cache.managers[0].index.units.popitem()


def leave_a_hash(cache: KVCacheManager) -> None:
    cache.pool.cached[next(iter(cache.managers[0].index.units.values()))] = False


def cache_a_plain_block(cache: KVCacheManager) -> None:
    cache.pool.cached[cache.pool.plain_ids()[0]] = True


def lose_a_row(cache: KVCacheManager) -> None:
    cache.rows._row_of.clear()


def offer_a_row_in_use(cache: KVCacheManager) -> None:
    cache.rows._unused.append(int(cache.rows.active()[0]))


def forget_who_is_in_a_row(cache: KVCacheManager) -> None:
    cache.rows._infos[int(cache.rows.active()[0])] = None


def promise_a_row_too_much_room(cache: KVCacheManager) -> None:
    cache.rows.capacity[cache.rows.active()[0]] += 1


def forget_when_to_cache(cache: KVCacheManager) -> None:
    cache.rows.cache_at[cache.rows.active()[0]] += 4


def forget_an_equal_block(cache: KVCacheManager) -> None:
    cache.managers[0].index._duplicates.clear()


def keep_a_tail_of_a_plain_block(cache: KVCacheManager) -> None:
    cache.managers[0].index.add_partial(int(cache.pool.plain_ids()[0]), [b"tail"], 0)


def keep_half_a_tail(cache: KVCacheManager) -> None:
    leader = next(iter(cache.managers[0].index.units.values()))
    cache.managers[0].index._partial_hashes[leader] = [b"tail"]


@pytest.mark.parametrize(
    "damage",
    [
        cache_a_plain_block,
        lose_a_row,
        offer_a_row_in_use,
        forget_who_is_in_a_row,
        promise_a_row_too_much_room,
        forget_when_to_cache,
        forget_an_equal_block,
        keep_a_tail_of_a_plain_block,
        keep_half_a_tail,
        lose_a_reference,
        lose_a_free_block,
        miscount,
        give_out_twice,
        forget_a_hash,
        leave_a_hash,
    ],
)
def test_an_imbalance_is_found(damage: Callable[[KVCacheManager], None]) -> None:
    with pytest.raises(IntegrityError):
        damaged(damage).check_integrity()
