"""The self-check finds what it is there to find."""

from collections.abc import Callable

import pytest

from jaxkv.cache_manager import KVCacheManager
from jaxkv.integrity import IntegrityError
from tests.core.builders import Driver, full, make_cache, mamba, seq, window


def damaged(damage: Callable[[KVCacheManager], None]) -> KVCacheManager:
    driver = Driver(make_cache([full(), window(8), window(8), mamba()]))
    driver.serve(seq(1, 30))
    driver.run(seq(2, 30))
    driver.cache.check_integrity()
    damage(driver.cache)
    return driver.cache


def lose_a_reference(cache: KVCacheManager) -> None:
    cache.pool.holders[cache.managers[0].units_of(0)[0]] -= 1


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


@pytest.mark.parametrize(
    "damage",
    [lose_a_reference, lose_a_free_block, miscount, give_out_twice, forget_a_hash, leave_a_hash],
)
def test_an_imbalance_is_found(damage: Callable[[KVCacheManager], None]) -> None:
    with pytest.raises(IntegrityError):
        damaged(damage).check_integrity()
