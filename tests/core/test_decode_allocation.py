"""Decoding in a batch must decide exactly what single calls, one row after the other, decide."""

import random
from typing import Any

import numpy as np
import pytest

from jaxkv.errors import JaxkvError
from jaxkv.request import Request
from tests.core.builders import Driver, full, local, make_cache, mamba, seq, window

KINDS: dict[str, list] = {
    "full": [full()],
    "windows": [full(), window(8), window(8), window(20)],
    "local": [full(), local(6), local(8)],
    "states": [full(), mamba(), mamba()],
    "unequal": [full(8), window(9, 4), mamba(8)],
}


def start(specs: list, num_requests: int, num_blocks: int) -> tuple[Driver, list[Request]]:
    driver = Driver(make_cache(specs, num_blocks, options={"retention_interval": None}))
    return driver, [driver.run(seq(n + 1, 3 + 5 * n)) for n in range(num_requests)]


def live_blocks(driver: Driver, request: Request) -> list[list[bool]]:
    return [[block > 0 for block in table] for table in driver.cache.get_block_ids(request.request_id)]


@pytest.mark.parametrize("specs", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("num_blocks", [130, 200, 4000])
def test_a_batch_equals_single_calls(specs: list, num_blocks: int) -> None:
    batch, requests = start(specs, 6, num_blocks)
    single, twins = start(specs, 6, num_blocks)
    rng = random.Random(0)
    rows = np.array([batch.cache.row_of(r.request_id) for r in requests])
    for _ in range(60):
        token = rng.randrange(3)
        for request in (*requests, *twins):
            request.append_tokens([token])
        batch.cache.new_step_starts()
        single.cache.new_step_starts()
        after = np.array([r.num_computed_tokens + 1 for r in requests])
        done = batch.cache.allocate_decodes(rows, after).num_done
        fitting = 0
        for twin in twins:
            if single.cache.allocate_slots(twin, 1) is None:
                break
            twin.num_computed_tokens += 1
            fitting += 1
        # Rows that come later may already have let go of blocks, so the batch can only do better.
        assert done >= fitting
        if done < len(rows) or fitting < len(rows):
            break
        for request in requests:
            request.num_computed_tokens += 1
        batch.cache.check_integrity()
        assert [live_blocks(batch, r) for r in requests] == [live_blocks(single, t) for t in twins]
        if num_blocks < 1000:
            continue
        # Where nothing is evicted, hits agree too; what goes first depends on when it was let go of.
        probe = requests[rng.randrange(6)].token_ids().tolist()[: rng.randrange(1, 60)]
        for driver in (batch, single):
            driver.cache.new_step_starts()
        assert batch.hit(probe) == single.hit(probe)
    for driver, some in ((batch, requests), (single, twins)):
        for request in some:
            driver.cache.free(request)
        assert driver.cache.num_free_blocks == num_blocks - 1


def test_rows_before_the_first_that_does_not_fit_are_done_and_the_rest_is_as_before() -> None:
    driver = Driver(make_cache([full()], num_blocks=6))
    cache = driver.cache
    requests = [driver.run(seq(n, 4)) for n in range(1, 4)]
    for request in requests:
        request.append_tokens([9])
    # Three blocks are held and two are free: the third row finds none.
    done = cache.allocate_decodes(np.array([0, 1, 2]), np.array([5, 5, 5]))
    assert done.num_done == 2
    assert [len(cache.get_block_ids(r.request_id)[0]) for r in requests] == [2, 2, 1]
    assert cache.rows.position[:3].tolist() == [5, 5, 4]
    cache.free(requests[0])
    assert cache.allocate_decodes(np.array([2]), np.array([5])).num_done == 1
    cache.check_integrity()


def test_a_later_row_that_needs_nothing_waits_behind_one_that_does_not_fit() -> None:
    driver = Driver(make_cache([full()], num_blocks=3))
    driver.run(seq(1, 4))
    second = driver.run(seq(2, 2))
    assert driver.cache.num_free_blocks == 0
    done = driver.cache.allocate_decodes(np.array([0, 1]), np.array([5, 3]))
    assert done.num_done == 0
    assert driver.cache.rows.position[driver.cache.row_of(second.request_id)] == 2


def test_blocks_that_other_rows_left_behind_are_found_when_room_is_short() -> None:
    driver = Driver(make_cache([window(4)], num_blocks=12))
    cache = driver.cache
    requests = [driver.run(seq(n, 16)) for n in range(1, 3)]
    assert cache.num_free_blocks == 3
    for request in requests:
        request.append_tokens([1])
    assert cache.allocate_decodes(np.array([0, 1]), np.array([17, 17])).num_done == 2
    assert cache.num_free_blocks == 11 - 2 * 2


@pytest.mark.parametrize("num_groups", [2, 8])
def test_a_step_without_a_block_boundary_looks_at_no_row(num_groups: int) -> None:
    specs = [full(), *[window(8)] * (num_groups - 1)]
    driver = Driver(make_cache(specs, num_blocks=500))
    requests = [driver.run(seq(n, 16)) for n in range(1, 6)]
    rows = np.arange(5)
    visited = []
    for position in range(17, 33):
        for request in requests:
            request.append_tokens([1])
            request.num_computed_tokens += 1
        visited.append(driver.cache.allocate_decodes(rows, np.full(5, position)).num_visited)
    assert visited == [5, 0, 0, 0] * 4


def test_bad_batches_are_refused() -> None:
    driver = Driver(make_cache([full()], max_model_len=20))
    driver.run(seq(1, 10))
    with pytest.raises(JaxkvError, match="1 rows need as many token counts, not 2"):
        driver.cache.allocate_decodes(np.array([0]), np.array([11, 12]))
    with pytest.raises(JaxkvError, match="row 0 has room for 10 tokens and gets one more: it cannot have 13"):
        driver.cache.allocate_decodes(np.array([0]), np.array([13]))
    full_row = Driver(make_cache([full()], max_model_len=20))
    full_row.run(seq(1, 20))
    with pytest.raises(JaxkvError, match=r"21 tokens.*20"):
        full_row.cache.allocate_decodes(np.array([0]), np.array([21]))
    empty: dict[str, Any] = driver.cache.allocate_decodes(np.array([], int), np.array([], int))._asdict()
    assert empty == {"num_done": 0, "num_visited": 0}
