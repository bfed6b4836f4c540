"""Content that comes from outside the pool and goes back there."""

from collections import defaultdict

import numpy as np
import pytest

from jaxkv.connector import (
    ContentKey,
    InMemoryConnector,
    NamedBlocks,
    blocks_to_load,
    blocks_to_save,
    needed_content,
)
from jaxkv.errors import JaxkvError
from jaxkv.managers import MambaManager
from jaxkv.request import Request
from tests.core.builders import Driver, full, local, make_cache, mamba, seq, window

KINDS = {
    "full": [full()],
    "window": [full(), window(8), window(8)],
    "state": [full(), mamba()],
    "many": [full(8), window(9, 4), local(8), mamba(4)],
}


class Store:
    """Block contents by id, and what a correct model would write there: the tokens up to a block's end."""

    def __init__(self) -> None:
        self.contents: dict[int, bytes] = defaultdict(bytes)

    def read_block(self, block_id: int) -> bytes:
        return self.contents[block_id]

    def write_block(self, block_id: int, content: bytes) -> None:
        self.contents[block_id] = content


def compute(driver: Driver, store: Store, request: Request) -> None:
    """Fills the request's blocks as a model would; a state's blocks say which of them they are."""
    cache = driver.cache
    row = cache.row_of(request.request_id)
    for manager in cache.managers:
        for sibling, group in enumerate(manager.group_ids):
            if isinstance(manager, MambaManager):
                ids = cache.pool.members(manager.number, manager.current[row : row + 1])[:, 0]
                part = ids[sibling * manager.blocks_per_state : (sibling + 1) * manager.blocks_per_state]
                for index, block in enumerate(part.tolist()):
                    store.write_block(block, content(group, request, request.num_computed_tokens, index))
                continue
            for position, block in enumerate(cache.get_block_ids(request.request_id)[group]):
                end = (position + 1) * manager.block_size
                if block and end <= request.num_computed_tokens:
                    store.write_block(block, content(group, request, end))


def content(group: int, request: Request, end: int, index: int = 0) -> bytes:
    return bytes([group, index]) + request.token_ids(0, end).tobytes()


def saved(driver: Driver, tokens: list[int], store: Store, connector: InMemoryConnector) -> None:
    """A request that is computed chunk by chunk, saved after each, and ends."""
    request = driver.request(tokens)
    hit = driver.cache.get_computed_blocks(request)
    request.num_computed_tokens = hit.num_tokens
    while request.num_computed_tokens < request.num_tokens:
        start = request.num_computed_tokens
        stops = [p for p in driver.cache.checkpoint_positions(request, hit) if p > start]
        end = min([request.num_tokens, *stops])
        driver.cache.new_step_starts()
        driver.cache.allocate_slots(request, end - start, hit=hit)
        request.num_computed_tokens, hit = end, None
        compute(driver, store, request)
        assert connector.save(request.request_id, blocks_to_save(driver.cache, request)) is False
    driver.cache.free(request)


@pytest.mark.parametrize("specs", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("blocks_per_state", [1, 2])
def test_what_was_saved_comes_back_into_the_right_blocks(specs: list, blocks_per_state: int) -> None:
    cache = make_cache(specs, 200, blocks_per_state=blocks_per_state)
    driver, store = Driver(cache), Store()
    connector = InMemoryConnector(cache, store)
    saved(driver, seq(1, 42), store, connector)
    assert cache.reset_prefix_cache()
    store.contents.clear()
    request = driver.request(seq(1, 42))
    hit = cache.get_computed_blocks(request)
    match = connector.match(request, hit.num_tokens)
    assert (hit.num_tokens, match.num_tokens, match.is_async) == (0, 40, False)
    cache.new_step_starts()
    cache.allocate_slots(request, 2, num_external_tokens=40)
    blocks = blocks_to_load(cache, request, 0, 40)
    connector.load(request.request_id, blocks)
    tables = cache.get_block_ids(request.request_id)
    for key, ids in blocks:
        for index, block in enumerate(ids):
            expected = store.contents[block]
            assert expected[0] == key.group
            assert expected[1] == index
            if specs[key.group].kind == "mamba":
                assert expected == content(key.group, request, 40, index)
                row = cache.row_of(request.request_id)
                manager = cache.managers[-1]
                assert isinstance(manager, MambaManager)
                units = manager.step_units(np.array([row]), np.array([40]))
                assert int(units.read[0]) == int(units.write[0]) > 0
            else:
                size = specs[key.group].block_size
                assert expected == content(key.group, request, (tables[key.group].index(block) + 1) * size)
    cache.check_integrity()
    # Everything brought is also in the index now, for others to hit.
    cache.free(request)
    cache.new_step_starts()
    if "mamba" not in {spec.kind for spec in specs}:
        assert driver.hit(seq(1, 42)) == 40


def test_a_match_goes_beyond_the_local_hit() -> None:
    cache = make_cache([full(), window(8)], 200)
    driver, store = Driver(cache), Store()
    connector = InMemoryConnector(cache, store)
    saved(driver, seq(1, 42), store, connector)
    assert cache.reset_prefix_cache()
    saved(driver, seq(1, 21), store, connector)
    request = driver.request(seq(1, 42))
    hit = cache.get_computed_blocks(request)
    assert (hit.num_tokens, connector.match(request, hit.num_tokens).num_tokens) == (20, 20)
    cache.allocate_slots(request, 2, hit=hit, num_external_tokens=20)
    # The window's own blocks below the external part are left behind already.
    assert [k.group for k, _ in blocks_to_load(cache, request, 20, 20)] == [0] * 5 + [1] * 2
    cache.check_integrity()


def test_a_block_that_a_connector_fills_is_not_copied_over() -> None:
    cache = make_cache([full(8), window(8)], 200, hash_block_size=4, options={"prefix_match_unit": 4})
    driver, store = Driver(cache), Store()
    connector = InMemoryConnector(cache, store)
    saved(driver, seq(1, 42), store, connector)
    assert cache.reset_prefix_cache()
    saved(driver, seq(1, 6), store, connector)
    cache.new_step_starts()
    request = driver.request(seq(1, 42))
    hit = cache.get_computed_blocks(request)
    # Half of the first block is here; all of it comes from outside.
    assert (hit.num_tokens, hit.parts[0].copy_from > 0) == (4, True)
    assert connector.match(request, 4).num_tokens == 36
    cache.allocate_slots(request, 2, hit=hit, num_external_tokens=36, delay_cache_blocks=True)
    blocks = blocks_to_load(cache, request, 4, 36)
    filled = [named.ids[0] for named in blocks if named.key.group == 0]
    assert filled == cache.get_block_ids(request.request_id)[0][:5]
    assert len(cache.take_block_copies().targets) == 0
    connector.load(request.request_id, blocks)
    cache.cache_blocks(request, 42)
    cache.check_integrity()
    assert driver.hit(seq(1, 42)) == 41 // 4 * 4
    cache.free(request)
    cache.new_step_starts()
    assert cache.num_free_blocks == 199


def test_nothing_is_matched_that_was_not_saved() -> None:
    cache = make_cache([full()])
    driver = Driver(cache)
    connector = InMemoryConnector(cache, Store())
    assert connector.match(driver.request(seq(1, 42)), 0).num_tokens == 0
    assert len(connector) == 0
    assert connector.finished_loads() == connector.finished_saves() == []
    with pytest.raises(JaxkvError, match="'r9' asks for content of group 3"):
        connector.load("r9", [NamedBlocks(ContentKey(3, b"x"), (1,))])
    with pytest.raises(JaxkvError, match="holds no blocks"):
        blocks_to_load(cache, driver.request(seq(1, 5)), 0, 4)


def test_at_least_one_token_is_left_to_compute() -> None:
    cache = make_cache([full()])
    driver, store = Driver(cache), Store()
    connector = InMemoryConnector(cache, store)
    saved(driver, seq(1, 41), store, connector)
    assert cache.reset_prefix_cache()
    assert connector.match(driver.request(seq(1, 40)), 0).num_tokens == 36


@pytest.mark.parametrize("match_unit", [None, 2])
def test_a_block_that_begins_before_brought_tokens_that_read_none_of_it_is_never_offered(
    match_unit: int | None,
) -> None:
    cache = make_cache([full(2), local(6, 4)], options={"prefix_match_unit": match_unit})
    request = Driver(cache).request(seq(1, 13))
    hit = cache.get_computed_blocks(request)
    # A chunk ends after 6 tokens: who goes on there reads nothing of the chunked group.
    keys = needed_content(cache, request, 0, 6)
    assert [key.group for key in keys] == [0, 0, 0]
    cache.allocate_slots(request, 7, hit=hit, num_external_tokens=6, delay_cache_blocks=True)
    assert [named.key for named in blocks_to_load(cache, request, 0, 6)] == keys
    cache.cache_blocks(request, 13)
    # Its block of tokens 4 to 7 has only 6 and 7.
    missing, incomplete, complete, _ = cache.get_block_ids(request.request_id)[1]
    assert (missing, incomplete > 0) == (0, True)
    assert [n.ids for n in blocks_to_save(cache, request) if n.key.group == 1] == [(complete,)]
    cache.check_integrity()
    cache.free(request)
    # 12 tokens are a hit: a chunk ends there. 8 or 10 tokens would need the incomplete block.
    assert Driver(cache).hit(seq(1, 10)) == 6
