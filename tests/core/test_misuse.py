"""Calls that would leave wrong content in the cache are refused and change nothing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxkv.cache_manager import KVCacheManager
from jaxkv.errors import JaxkvError
from jaxkv.request import Request
from tests.core.builders import full, make_cache, mamba, seq, snapshot, window


def running_cache() -> tuple[KVCacheManager, Request]:
    """A cache in which "a" has room for 8 of its 40 tokens."""
    cache = make_cache([full(), window(6)])
    request = Request("a", seq(1, 40))
    cache.allocate_slots(request, 8)
    request.num_computed_tokens = 8
    return cache, request


def test_tokens_without_room_cannot_be_computed() -> None:
    cache, request = running_cache()
    before = snapshot(cache)
    request.num_computed_tokens = 32
    with pytest.raises(JaxkvError, match="has 32 computed tokens, but had room for 8 only"):
        cache.allocate_slots(request, 4)
    assert snapshot(cache) == before
    # Or the tokens [8, 32), which nobody computed, could be hit.
    assert cache.get_computed_blocks(Request("b", seq(1, 40))).num_tokens == 8


def test_what_has_no_room_is_not_left_behind() -> None:
    cache, request = running_cache()
    before = snapshot(cache)
    with pytest.raises(JaxkvError, match="has room for 8 tokens, so 20 cannot be computed"):
        cache.remove_skipped_blocks(request, 20)
    assert snapshot(cache) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda cache, other: cache.allocate_slots(other, 4),
        lambda cache, other: cache.cache_blocks(other, 4),
        lambda cache, other: cache.remove_skipped_blocks(other, 4),
        lambda cache, other: cache.checkpoint_positions(other),
        lambda cache, other: cache.free(other),
    ],
    ids=["allocate_slots", "cache_blocks", "remove_skipped_blocks", "checkpoint_positions", "free"],
)
def test_an_id_belongs_to_one_request(call: Callable[[KVCacheManager, Request], Any]) -> None:
    cache = make_cache([full(), mamba()])
    cache.allocate_slots(Request("a", seq(1, 8)), 8)
    before = snapshot(cache)
    with pytest.raises(JaxkvError, match="another request with the id 'a' holds blocks"):
        call(cache, Request("a", seq(2, 8)))
    assert snapshot(cache) == before


@pytest.mark.parametrize("which", ["another prompt", "another salt", "another cache"])
def test_a_hit_serves_only_whom_it_was_found_for(which: str) -> None:
    cache, request = running_cache()
    cache.free(request)
    hit = cache.get_computed_blocks(Request("b", seq(1, 40)))
    assert hit.num_tokens == 8
    other = {
        "another prompt": Request("c", seq(2, 40)),
        "another salt": Request("c", seq(1, 40), cache_salt="mine"),
        "another cache": Request("c", seq(1, 40)),
    }[which]
    if which == "another cache":
        cache, _ = running_cache()
    before = snapshot(cache)
    with pytest.raises(JaxkvError, match="the hit of 8 tokens was not found for request 'c' in this cache"):
        cache.allocate_slots(other, 4, hit=hit)
    assert snapshot(cache) == before


def test_a_hit_of_an_equal_prompt_may_be_used() -> None:
    cache, request = running_cache()
    cache.free(request)
    hit = cache.get_computed_blocks(Request("b", seq(1, 40)))
    assert cache.allocate_slots(Request("c", seq(1, 20)), 4, hit=hit) is not None
    cache.check_integrity()


def test_a_row_decodes_one_token_a_step() -> None:
    cache, _ = running_cache()
    # The ninth token needs a block of its own, the tenth does not.
    for num_tokens in (9, 10):
        before = snapshot(cache)
        with pytest.raises(JaxkvError, match="a row stands twice among the 2 rows"):
            cache.allocate_decodes(np.array([0, 0]), np.array([num_tokens, num_tokens]))
        assert snapshot(cache) == before
        cache.allocate_decodes(np.array([0]), np.array([num_tokens]))
    cache.check_integrity()


def test_an_integer_of_numpy_is_refused_by_name() -> None:
    cache, request = running_cache()
    before = snapshot(cache)
    with pytest.raises(JaxkvError, match=r"num_new_tokens must be a Python integer, not np.int64\(1\)"):
        cache.allocate_slots(request, np.int64(1))  # type: ignore[arg-type]
    assert snapshot(cache) == before


def test_what_is_no_request_is_refused_by_name() -> None:
    cache, _ = running_cache()
    with pytest.raises(JaxkvError, match="request must be a Request, not 'a'"):
        cache.allocate_slots("a", 5)  # type: ignore[arg-type]
