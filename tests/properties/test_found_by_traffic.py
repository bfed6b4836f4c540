"""What random traffic found once, as small cases of their own."""

import numpy as np
import pytest

from jaxkv.cache_manager import KVCacheManager
from jaxkv.errors import JaxkvError
from jaxkv.request import Request
from tests.properties.hit_definition import GroupRule
from tests.properties.workload import CacheCase


def in_two_steps(num_before: int, num_now: int) -> KVCacheManager:
    """Blocks of 3 tokens that hit at any token; a request whose last tokens are being computed."""
    manager = CacheCase(rules=(GroupRule("full", 3),), num_blocks=20, match_unit=1).manager()
    request = Request("first", [0] * (num_before + num_now))
    manager.new_step_starts()
    manager.allocate_slots(request, num_before)
    request.num_computed_tokens = num_before
    manager.new_step_starts()
    manager.allocate_slots(request, num_now)
    return manager


def test_a_token_of_the_running_step_is_not_copied() -> None:
    """A block fills over many steps: what the running step adds cannot be copied before that step runs."""
    manager, second = in_two_steps(4, 1), Request("second", [0] * 6)
    hit = manager.get_computed_blocks(second)
    assert (hit.num_tokens, hit.pending) == (4, True)
    manager.new_step_starts()
    hit = manager.get_computed_blocks(second)
    assert (hit.num_tokens, hit.pending) == (5, False)


def test_a_request_waits_for_nothing_that_would_not_make_its_hit_longer() -> None:
    # The whole block is only complete in the second step; its first token, all that `second` may hit, was
    # before.
    manager, second = in_two_steps(4, 2), Request("second", [0] * 5)
    hit = manager.get_computed_blocks(second)
    assert (hit.num_tokens, hit.pending) == (4, False)


def test_repeated_hits_leave_no_trace_in_the_index() -> None:
    """Every request that started from a hit recorded the prefixes inside its blocks once more."""
    manager = CacheCase(rules=(GroupRule("full", 4),), num_blocks=20, match_unit=1).manager()

    def serve(name: str) -> None:
        manager.new_step_starts()
        request = Request(name, [0] * 9)
        hit = manager.get_computed_blocks(request)
        manager.allocate_slots(request, 9 - hit.num_tokens, hit=hit)
        manager.take_block_copies()
        manager.free(request)

    index = manager.managers[0].index
    serve("first")
    blocks = manager.pool.cached_units(0)
    recorded = {int(block): len(index._partial_hashes[int(block)]) for block in blocks[:2]}
    for turn in range(5):
        serve(f"again-{turn}")
    assert {block: len(index._partial_hashes[block]) for block in recorded} == recorded


def test_the_block_a_hit_ends_in_is_copied_where_a_connector_brings_what_follows() -> None:
    """The copy went to the block of the last brought token, or beyond the request's table."""
    manager = CacheCase(rules=(GroupRule("full", 4),), num_blocks=20, match_unit=1).manager()
    manager.allocate_slots(Request("first", [0] * 6), 6)
    second = Request("second", [0] * 5 + [1] * 10)
    hit = manager.get_computed_blocks(second)
    assert hit.num_tokens == 5
    manager.allocate_slots(second, 0, hit=hit, num_external_tokens=8, delay_cache_blocks=True)
    copies = manager.take_block_copies()
    table = manager.get_block_ids("second")[0]
    assert copies.targets.tolist() == [table[1]]
    assert copies.sources.tolist() == [manager.get_block_ids("first")[0][1]]


def test_a_block_that_brought_tokens_push_out_of_the_window_is_not_copied() -> None:
    manager = CacheCase(rules=(GroupRule("sliding_window", 4, 4),), num_blocks=20, match_unit=1).manager()
    manager.allocate_slots(Request("first", [0] * 6), 6)
    second = Request("second", [0] * 5 + [1] * 20)
    hit = manager.get_computed_blocks(second)
    assert hit.num_tokens == 5
    manager.allocate_slots(second, 0, hit=hit, num_external_tokens=15, delay_cache_blocks=True)
    assert len(manager.take_block_copies().targets) == 0
    manager.check_integrity()


def test_rows_outside_the_table_are_refused() -> None:
    manager = CacheCase(rules=(GroupRule("full", 4),), num_blocks=20).manager()
    for row in (-1, 4, 10_000):
        with pytest.raises(JaxkvError, match=str(row)):
            manager.allocate_decodes(np.array([row]), np.array([3]))
