"""Requests that decode the same tokens in the same steps complete blocks of equal hash at once."""

import numpy as np
import pytest

from jaxkv.specs import KVCacheSpec
from tests.core.builders import Driver, full, make_cache, mamba, seq, take_away, window


@pytest.mark.parametrize("specs", [[full()], [full(), window(8), window(8)], [full(), mamba()]])
def test_equal_blocks_completed_in_one_step_are_all_kept_and_all_forgotten(specs: list[KVCacheSpec]) -> None:
    driver = Driver(make_cache(specs, 200))
    cache = driver.cache
    requests = [driver.run(seq(1, 6)) for _ in range(3)]
    rows = np.array([cache.row_of(request.request_id) for request in requests])
    for token in range(20):
        for request in requests:
            request.append_tokens([token])
        cache.new_step_starts()
        after = np.array([request.num_computed_tokens + 1 for request in requests])
        assert cache.allocate_decodes(rows, after).num_done == len(rows)
        for request in requests:
            request.num_computed_tokens += 1
        cache.check_integrity()
    answer = requests[0].token_ids().tolist()
    cache.new_step_starts()
    assert driver.hit(answer) == 24
    for request in requests:
        cache.free(request)
        cache.check_integrity()
    assert driver.hit(answer) == 24
    take_away(cache, cache.num_free_blocks)
    cache.check_integrity()
    assert driver.hit(answer) == 0
