import numpy as np
import pytest

from jaxkv.errors import JaxkvError
from jaxkv.pool import NOT_CACHED, BlockPool, Units, by_end


def make_pool(num_blocks: int = 20, *widths: int) -> BlockPool:
    pool = BlockPool(num_blocks)
    for number, width in enumerate(widths or (1,)):
        pool.register(width, lambda leaders, number=number: None)
    return pool


def cache(pool: BlockPool, leaders: np.ndarray, strong: bool = True) -> None:
    pool.set_cached(leaders, strong, 0)


def test_the_null_block_is_never_given_out() -> None:
    pool = make_pool(5)
    assert sorted(pool.take(0, 4)[0].tolist()) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_more_blocks_than_ids_are_refused() -> None:
    with pytest.raises(JaxkvError, match="num_blocks must be at most 134217728, not 134217729"):
        BlockPool(2**27 + 1)


def test_ids_are_given_out_in_ascending_order_at_first() -> None:
    pool = make_pool(10)
    assert pool.take(0, 3)[0].tolist() == [1, 2, 3]
    assert pool.take(0, 2)[0].tolist() == [4, 5]


def test_a_unit_has_as_many_ids_as_its_manager_has_siblings() -> None:
    pool = make_pool(20, 3)
    ids = pool.take(0, 2)
    assert ids.shape == (3, 2)
    assert len(set(ids.ravel().tolist())) == 6
    assert pool.num_free == 19 - 6
    assert pool.members(0, ids[0]).tolist() == ids.tolist()


def test_units_without_content_are_plain_again_as_soon_as_nobody_holds_them() -> None:
    pool = make_pool(20, 2)
    leaders = pool.take(0, 3)[0]
    pool.touch(0, leaders[:1])
    pool.let_go(leaders)
    assert pool.num_free == 19 - 2
    pool.let_go(leaders[:1])
    assert pool.num_free == 19
    assert len(pool.plain_ids()) == 19


def test_cached_units_queue_up_and_the_least_recently_freed_goes_first() -> None:
    pool = make_pool(8)
    leaders = pool.take(0, 7)[0]
    cache(pool, leaders)
    order = leaders[[3, 0, 6, 1, 2, 5, 4]]
    pool.let_go(order)
    assert pool.num_free == 7
    assert len(pool.plain_ids()) == 0
    assert [int(pool.take(0, 1)[0, 0]) for _ in range(7)] == order.tolist()


def test_weak_units_go_before_strong_ones_freed_earlier() -> None:
    pool = make_pool(5)
    leaders = pool.take(0, 4)[0]
    cache(pool, leaders)
    pool.strong[leaders[2:]] = False
    pool.let_go(leaders)
    assert pool.free_units().tolist() == leaders[[2, 3, 0, 1]].tolist()


def test_promoted_units_go_with_the_strong_ones() -> None:
    pool = make_pool(5)
    leaders = pool.take(0, 4)[0]
    cache(pool, leaders, strong=False)
    pool.let_go(leaders)
    for leader in leaders[:2].tolist():
        pool.promote(leader)
    assert pool.free_units().tolist() == leaders[[2, 3, 0, 1]].tolist()
    assert pool.num_free == 4


def test_a_touched_unit_leaves_the_queue_and_comes_back_at_its_end() -> None:
    pool = make_pool(5)
    leaders = pool.take(0, 4)[0]
    cache(pool, leaders)
    pool.let_go(leaders)
    pool.touch(0, leaders[:1])
    assert pool.num_free == 3
    assert pool.free_units().tolist() == leaders[1:].tolist()
    pool.let_go(leaders[:1])
    assert pool.free_units().tolist() == [*leaders[1:].tolist(), int(leaders[0])]


def test_evicting_one_id_turns_the_whole_unit_into_plain_ids() -> None:
    pool = make_pool(7, 3, 1)
    told: list[object] = []
    pool._listeners[0] = told.append
    ids = pool.take(0, 2)
    cache(pool, ids[0])
    pool.let_go(ids[0])
    version = pool.version
    pool.take(1, 1)
    assert told == [int(ids[0, 0])]
    assert pool.num_free == 5
    assert len(pool.plain_ids()) == 2
    assert pool.version > version
    assert pool.cached_by[ids[0, 0]] == NOT_CACHED


def test_room_for_many_units_of_a_manager_is_made_of_its_own_where_they_go_first() -> None:
    """12 wide units and 9 narrow ones fill the pool; 10 of each kind are to be taken."""
    pool = make_pool(1 + 12 * 3 + 9, 3, 1)
    wide, narrow = pool.take(0, 12), pool.take(1, 9)[0]
    cache(pool, wide[0])
    cache(pool, narrow)
    pool.let_go(np.concatenate([wide[0], narrow]))
    pool.make_room(10 * 3 + 5, [10, 5])
    assert pool.num_free == 45
    again, others = pool.take(0, 10), pool.take(1, 5)
    assert again.tolist() == wide[:, :10].tolist()
    assert pool.members(0, again[0]).tolist() == again.tolist()
    # What is left of the wide ones' room is what the narrow ones get.
    assert set(others[0].tolist()) <= set(wide[:, 10:].ravel().tolist())
    assert pool.num_free == 10
    assert len(pool.plain_ids()) == 1
    assert pool.free_units().tolist() == narrow.tolist()
    assert (pool.refs[again[0]] == 1).all()
    assert not pool.cached[again[0]].any()
    assert not pool.refs[again[1:]].any()
    # Without content they are plain ids when nobody holds them any more, all of them.
    pool.let_go(again[0])
    pool.let_go(others[0])
    assert sorted(pool.plain_ids().tolist()) == sorted(wide.ravel().tolist())


def test_forgetting_a_held_unit_leaves_it_with_its_holder() -> None:
    pool = make_pool(4)
    leaders = pool.take(0, 2)[0]
    cache(pool, leaders)
    pool.forget(0, leaders)
    assert pool.num_free == 1
    pool.let_go(leaders)
    assert len(pool.free_units()) == 0
    assert pool.num_free == 3


def test_the_queue_survives_many_turns_of_its_ring() -> None:
    rng = np.random.default_rng(0)
    pool = make_pool(12)
    leaders = pool.take(0, 11)[0]
    cache(pool, leaders)
    pool.let_go(leaders)
    order = leaders.tolist()
    for _ in range(500):
        chosen = rng.choice(leaders, rng.integers(1, 5), replace=False).astype(np.int32)
        pool.touch(0, chosen)
        pool.let_go(chosen)
        order = [leader for leader in order if leader not in chosen] + chosen.tolist()
        assert pool.free_units().tolist() == order


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(JaxkvError, match=r"num_blocks.*0"):
        BlockPool(0)


def test_nobody_is_told_of_an_eviction_of_nothing() -> None:
    told: list[object] = []
    pool = BlockPool(5)
    pool.register(1, told.append)
    leaders = pool.take(0, 4)[0]
    pool.set_cached(leaders[:2], False, 0)
    pool.set_cached(leaders[2:], True, 0)
    pool.let_go(leaders)
    # The queue that goes first now has only entries to skip.
    pool.touch(0, leaders[:2])
    pool.take(0, 1)
    assert told == [int(leaders[2])]
    assert pool.version == 1


def test_units_of_several_managers_go_by_their_ends() -> None:
    first = Units(np.array([11, 12, 13, 14]), range(-16, 0, 4))
    second = Units(np.array([21, 22]), [-12, -10])
    # They end at 16, 12, 8, 4 and at 12, 10.
    assert by_end([first, second]).tolist() == [11, 12, 21, 22, 13, 14]
    assert by_end([second, first]).tolist() == [11, 21, 12, 22, 13, 14]
    assert by_end([first]).tolist() == [11, 12, 13, 14]


def test_units_of_several_managers_are_let_go_of_at_once() -> None:
    pool = make_pool(20, 1, 3)
    narrow, wide = pool.take(0, 4)[0], pool.take(1, 2)
    cache(pool, narrow[:2])
    cache(pool, wide[0, :1], strong=False)
    pool.touch(0, narrow[:1])
    # One has another holder, one of each manager has no content, one is weak.
    pool.let_go(np.concatenate([narrow, wide[0]]))
    assert pool.num_free == 18
    assert pool.free_units().tolist() == [int(wide[0, 0]), int(narrow[1])]
    assert set(pool.plain_ids().tolist()) >= {*narrow[2:].tolist(), *wide[:, 1].tolist()}
    assert [int(pool.take(0, 1)[0, 0]) for _ in range(18)][-1] == int(narrow[1])
    assert pool.refs[narrow[0]] == 1


def test_all_ids_of_units_without_content_come_back() -> None:
    for num_units in (2, 20):
        pool = make_pool(100, 3, 1)
        pool.let_go(np.concatenate([pool.take(0, num_units)[0], pool.take(1, num_units)[0]]))
        assert pool.num_free == 99
        assert sorted(pool.plain_ids().tolist()) == list(range(1, 100))
