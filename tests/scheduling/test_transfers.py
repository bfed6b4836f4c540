"""Tokens that a connector brings: loaded at once, loaded meanwhile; and blocks saved at the end."""

from collections.abc import Sequence

import pytest

from jaxkv.cache_manager import KVCacheManager
from jaxkv.connector import InMemoryConnector, KVConnector, NamedBlocks
from jaxkv.errors import JaxkvError
from jaxkv.request import RequestStatus
from tests.scheduling.connectors import SlowConnector, Store, prompt, slow
from tests.scheduling.serving import Serving, continuation, full, window


def test_what_was_saved_by_one_engine_run_is_loaded_after_the_cache_is_reset() -> None:
    store = Store()

    def connect(cache: KVCacheManager) -> KVConnector:
        return InMemoryConnector(cache, store)

    serving = Serving([full(), window(8)], 40, make_connector=connect)
    serving.add("a", prompt(1, 22), max_tokens=2)
    serving.run()
    assert serving.kv.reset_prefix_cache()
    serving.add("b", prompt(1, 22), max_tokens=2)
    output = serving.step()
    assert (output.num_computed.tolist(), output.num_scheduled.tolist()) == ([20], [2])
    assert len(store.written) == 5 + 2  # all blocks of full attention, two of the window
    serving.run()
    b = serving.requests["b"]
    assert (b.num_cached_tokens, b.num_external_tokens) == (20, 20)
    assert b.output_token_ids.tolist() == continuation(prompt(1, 22), 2)
    assert serving.kv.num_free_blocks == 39


@pytest.mark.parametrize("overlap", [False, True], ids=["one_by_one", "overlapping"])
def test_what_a_window_leaves_behind_is_saved_once_its_step_has_run(overlap: bool) -> None:
    saved: list[NamedBlocks] = []

    class Recorder(SlowConnector):
        saves_computed = True

        def save_computed(self, blocks: Sequence[NamedBlocks]) -> None:
            saved.extend(blocks)

    serving = Serving(
        [full(), window(4)], 60, make_connector=lambda cache: Recorder(0), async_scheduling=overlap
    )
    request = serving.add("a", prompt(1, 30), max_tokens=12)
    serving.schedule()
    assert not saved
    serving.update()
    # 16 tokens: four blocks of each group, of which the window needs the last one only.
    hashes = request.block_hashes(serving.kv.hasher)
    by_group = {group: [b.key.block_hash for b in saved if b.key.group == group] for group in (0, 1)}
    assert by_group == {0: hashes[:4], 1: hashes[:4]}
    serving.run()
    by_group = {group: [b.key.block_hash for b in saved if b.key.group == group] for group in (0, 1)}
    # The last of 42 tokens is never computed: ten blocks are complete.
    assert by_group == {0: hashes[:10], 1: hashes[:10]}
    assert serving.kv.num_free_blocks == 59
    assert serving.kv.reset_prefix_cache()


def test_a_shorter_prompt_loads_window_blocks_that_its_owner_had_left_behind() -> None:
    store = Store()
    serving = Serving([full(), window(4)], 60, make_connector=lambda cache: InMemoryConnector(cache, store))
    serving.add("a", prompt(1, 40), max_tokens=8)
    serving.run()
    assert serving.kv.reset_prefix_cache()
    serving.add("b", prompt(1, 18), max_tokens=2)
    serving.run()
    b = serving.requests["b"]
    assert (b.num_cached_tokens, b.num_external_tokens) == (16, 16)
    assert b.output_token_ids.tolist() == continuation(prompt(1, 18), 2)


@pytest.mark.parametrize("num_blocks", [13, 20, 60])
def test_units_held_for_a_connector_cost_nobody_its_blocks(num_blocks: int) -> None:
    """An aborted request, a small pool and overlapping steps: all blocks come back, nobody waits for ever."""
    for overlap in (False, True):
        store = Store()
        serving = Serving(
            [full(), window(4)],
            num_blocks,
            make_connector=lambda cache, store=store: InMemoryConnector(cache, store),
            async_scheduling=overlap,
            max_num_batched_tokens=8,
            max_model_len=24,
        )
        for i in range(5):
            serving.add(f"r{i}", prompt(i, 12 - i), max_tokens=6)
        for _ in range(3):
            serving.step()
        serving.scheduler.abort("r0")
        serving.run()
        for i in range(1, 5):
            assert serving.requests[f"r{i}"].output_token_ids.tolist() == continuation(prompt(i, 12 - i), 6)
        assert serving.kv.num_free_blocks == num_blocks - 1
        assert not serving.kv.computed


def test_a_request_waits_for_its_content_and_others_go_on() -> None:
    connector = SlowConnector(16)
    serving = slow(connector)
    serving.add("a", prompt(1, 20), max_tokens=2)
    connector.num_tokens = 16
    assert len(serving.step()) == 0
    a = serving.requests["a"]
    assert a.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert connector.loads == ["a"]
    assert serving.scheduler.num_requests_waiting == 1
    connector.num_tokens = 0
    serving.add("b", prompt(2, 6), max_tokens=2)
    assert serving.step().num_scheduled_tokens() == {"b": 6}
    serving.add("c", prompt(1, 20), max_tokens=1)
    # What is still on its way is not a hit for others.
    assert serving.step().num_scheduled_tokens() == {"b": 1, "c": 15}
    connector.done_loads = ["a"]
    output = serving.step()
    assert output.num_scheduled_tokens()["a"] == 4
    serving.run()
    assert a.output_token_ids.tolist() == continuation(prompt(1, 20), 2)
    assert serving.kv.num_free_blocks == 39


def test_a_request_aborted_during_its_load_keeps_its_blocks_until_the_load_is_done() -> None:
    connector = SlowConnector(16)
    serving = slow(connector)
    serving.add("a", prompt(1, 20), max_tokens=2)
    serving.step()
    held = 39 - serving.kv.num_free_blocks
    assert held > 0
    serving.scheduler.abort("a")
    serving.step()
    assert serving.kv.num_free_blocks == 39 - held
    with pytest.raises(JaxkvError, match="'a' is already in use"):
        serving.add("a", prompt(1, 20))
    connector.done_loads = ["a"]
    serving.step()
    assert serving.kv.num_free_blocks == 39
    serving.add("a", prompt(1, 5), max_tokens=1)


def test_blocks_are_kept_while_the_connector_still_reads_them() -> None:
    connector = SlowConnector(0, slow_saves=True)
    serving = slow(connector)
    serving.add("a", prompt(1, 20), max_tokens=2)
    serving.run()
    assert connector.saves == ["a"]
    assert serving.kv.num_free_blocks < 39
    connector.done_saves = ["a"]
    serving.step()
    assert serving.kv.num_free_blocks == 39


def test_what_a_window_left_behind_is_not_offered_and_then_given_out_while_it_is_read() -> None:
    offered: list[int] = []

    class Recorder(SlowConnector):
        def save(self, request_id: str, blocks: Sequence[NamedBlocks]) -> bool:
            offered.extend(block for named in blocks for block in named.ids)
            return super().save(request_id, blocks)

    connector = Recorder(0, slow_saves=True)
    serving = Serving([full(), window(4)], 40, make_connector=lambda cache: connector)
    # 12 tokens are computed. The last decodes need no block, and the window of 4 leaves block 1 in them.
    serving.add("a", prompt(1, 8), max_tokens=5)
    serving.run()
    assert len(offered) == 3 + 1
    assert 39 - serving.kv.num_free_blocks == len(offered)
    connector.done_saves = ["a"]
    serving.step()
    assert serving.kv.num_free_blocks == 39


def test_loads_are_reserved_for_like_prompts_being_read() -> None:
    connector = SlowConnector(8)
    serving = slow(connector, 1 + 10 + 8)
    serving.add("a", prompt(1, 36), max_tokens=1)
    serving.add("b", prompt(2, 36), max_tokens=1)
    serving.step()
    assert connector.loads == ["a"]
    connector.done_loads = ["a"]
    for _ in range(20):
        serving.step()
        connector.done_loads = [name for name in connector.loads if name != "a"]
        if not serving.scheduler.has_unfinished_requests:
            break
    assert serving.requests["b"].finish_reason == "length"
    assert serving.scheduler.stats.num_preemptions == 0
