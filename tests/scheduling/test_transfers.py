"""Tokens that a connector brings: loaded at once, loaded meanwhile; and blocks saved at the end."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from jaxkv.cache_manager import KVCacheManager
from jaxkv.cache_request import CacheRequest
from jaxkv.connector import ExternalMatch, InMemoryConnector, KVConnector, NamedBlocks
from jaxkv.errors import JaxkvError
from jaxkv.request import RequestStatus
from tests.scheduling.serving import Serving, continuation, full, mamba, window


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 1000 + 7 * i) % 5000 for i in range(length)]


class Store:
    """Blocks of the pool as bytes that name their id, so that a test sees what was copied where."""

    def __init__(self) -> None:
        self.written: dict[int, bytes] = {}

    def read_block(self, block_id: int) -> bytes:
        return str(block_id).encode()

    def write_block(self, block_id: int, content: bytes) -> None:
        self.written[block_id] = content


class SlowConnector(KVConnector):
    """Offers a fixed number of tokens; says when a test tells it to that loads and saves are done."""

    def __init__(self, num_tokens: int, *, slow_saves: bool = False) -> None:
        self.num_tokens = num_tokens
        self.slow_saves = slow_saves
        self.loads: list[str] = []
        self.saves: list[str] = []
        self.done_loads: list[str] = []
        self.done_saves: list[str] = []
        self.lost_loads: list[str] = []

    def match(self, request: CacheRequest, num_local_tokens: int) -> ExternalMatch:
        return ExternalMatch(max(0, self.num_tokens - num_local_tokens), is_async=True)

    def load(self, request_id: str, blocks: Sequence[NamedBlocks]) -> None:
        self.loads.append(request_id)

    def save(self, request_id: str, blocks: Sequence[NamedBlocks]) -> bool:
        self.saves.append(request_id)
        return self.slow_saves

    def finished_loads(self) -> list[str]:
        done, self.done_loads = self.done_loads, []
        return done

    def failed_loads(self) -> list[str]:
        lost, self.lost_loads = self.lost_loads, []
        return lost

    def finished_saves(self) -> list[str]:
        done, self.done_saves = self.done_saves, []
        return done


def slow(connector: SlowConnector, num_blocks: int = 40) -> Serving:
    return Serving([full(), window(8)], num_blocks, make_connector=lambda cache: connector)


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


def test_a_connector_that_leaves_nothing_to_compute_is_refused() -> None:
    serving = slow(SlowConnector(20))
    serving.add("a", prompt(1, 20), max_tokens=2)
    with pytest.raises(JaxkvError, match="offers 20 tokens beyond 0 of request 'a', which has 20"):
        serving.schedule()


def test_a_connector_that_reports_what_it_was_not_asked_for_is_refused() -> None:
    connector = SlowConnector(16)
    serving = slow(connector)
    serving.add("a", prompt(1, 20), max_tokens=2)
    serving.step()
    connector.done_loads = ["b"]
    with pytest.raises(JaxkvError, match="done loading request 'b', which it was not asked for"):
        serving.schedule()


@pytest.mark.parametrize(
    ("specs", "offered", "end"),
    [
        # A state after 6 tokens: hashes end after 4 and 8.
        ([full(), mamba()], 6, 6),
        # The block of 8 that ends after 24 tokens, of a prompt of 20.
        ([full(8), window(6)], 17, 24),
    ],
)
def test_an_offer_that_no_hash_names_is_refused_before_anything_is_given_out(
    specs: list, offered: int, end: int
) -> None:
    connector = SlowConnector(offered)
    serving = Serving(specs, 40, make_connector=lambda cache: connector)
    serving.add("a", prompt(1, 20), max_tokens=2)
    with pytest.raises(
        JaxkvError, match=f"ends after {end} tokens of request 'a' has no name.*of 4 up to 20"
    ):
        serving.schedule()
    assert serving.kv.num_free_blocks == 39
    assert not connector.loads
    connector.num_tokens = 0
    serving.run()
    assert serving.requests["a"].output_token_ids.tolist() == continuation(prompt(1, 20), 2)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_load_that_fails_leaves_no_block_and_nothing_to_hit(is_async: bool) -> None:
    class Broken(SlowConnector):
        def match(self, request: CacheRequest, num_local_tokens: int) -> ExternalMatch:
            return ExternalMatch(self.num_tokens, is_async)

        def load(self, request_id: str, blocks: Sequence[NamedBlocks]) -> None:
            raise OSError("gone")

    connector = Broken(16)
    serving = slow(connector)
    serving.add("a", prompt(1, 20), max_tokens=2)
    with pytest.raises(OSError, match="gone"):
        serving.schedule()
    serving.kv.check_integrity()
    assert serving.kv.num_free_blocks == 39
    connector.num_tokens = 0
    serving.run()
    a = serving.requests["a"]
    assert (a.num_cached_tokens, a.num_external_tokens) == (0, 0)
    assert a.output_token_ids.tolist() == continuation(prompt(1, 20), 2)


def test_a_cache_without_hashes_takes_no_connector() -> None:
    with pytest.raises(JaxkvError, match="enable_caching is False"):
        Serving([full()], 40, enable_caching=False, make_connector=lambda cache: SlowConnector(8))
    with pytest.raises(JaxkvError, match="enable_caching is False"):
        Serving(
            [full()], 40, enable_caching=False, make_connector=lambda cache: InMemoryConnector(cache, Store())
        )


def test_what_an_asynchronous_load_does_not_bring_is_computed() -> None:
    connector = SlowConnector(16)
    serving = slow(connector)
    a = serving.add("a", prompt(1, 20), max_tokens=2)
    assert len(serving.step()) == 0
    connector.lost_loads = ["a"]
    # The budget is 16 tokens; nothing that was to come is taken for cached, by nobody.
    assert serving.step().num_scheduled_tokens() == {"a": 16}
    connector.num_tokens = 0
    serving.add("b", prompt(2, 9), max_tokens=2)
    serving.run()
    assert connector.loads == ["a"]
    assert (a.num_cached_tokens, a.num_external_tokens, a.num_preemptions) == (0, 0, 0)
    assert serving.scheduler.stats.prompt_tokens == 20 + 9
    assert a.output_token_ids.tolist() == continuation(prompt(1, 20), 2)
    assert serving.kv.num_free_blocks == 39


def test_a_failed_load_of_an_aborted_request_gives_its_blocks_back_and_frees_its_id() -> None:
    connector = SlowConnector(16)
    serving = slow(connector)
    serving.add("a", prompt(1, 20), max_tokens=2)
    serving.step()
    serving.scheduler.abort("a")
    connector.lost_loads = ["a"]
    serving.step()
    assert serving.kv.num_free_blocks == 39
    # Another request of the same id is loaded for again.
    serving.add("a", prompt(1, 20), max_tokens=2)
    serving.step()
    assert connector.loads == ["a", "a"]
    connector.lost_loads = ["a"]
    serving.run()
    assert serving.kv.num_free_blocks == 39


class Unreliable(InMemoryConnector):
    """Raises OSError whenever `is_gone` says so of what it is asked for."""

    def __init__(self, cache: KVCacheManager, is_gone: Callable[[str], bool]) -> None:
        super().__init__(cache, Store())
        self._is_gone = is_gone

    def _ask(self, what: str) -> None:
        if self._is_gone(what):
            raise OSError(f"{what}: gone")

    def match(self, request: CacheRequest, num_local_tokens: int) -> ExternalMatch:
        self._ask("match")
        return super().match(request, num_local_tokens)

    def load(self, request_id: str, blocks: Sequence[NamedBlocks]) -> None:
        self._ask("load")
        super().load(request_id, blocks)

    def save_computed(self, blocks: Sequence[NamedBlocks]) -> None:
        self._ask("save_computed")
        super().save_computed(blocks)

    def save(self, request_id: str, blocks: Sequence[NamedBlocks]) -> bool:
        self._ask("save")
        super().save_computed(blocks)
        return False


def unreliable(is_gone: Callable[[str], bool], **options: Any) -> Serving:
    specs = [full(), window(8), mamba()]
    return Serving(specs, 60, make_connector=lambda cache: Unreliable(cache, is_gone), **options)


def test_a_step_is_not_lost_where_the_connector_raises_while_it_is_put_together() -> None:
    gone: set[str] = set()
    serving = unreliable(gone.__contains__, max_num_batched_tokens=12)
    serving.add("a", prompt(1, 20), max_tokens=3)
    assert serving.step().request_ids.tolist() == ["a"]
    serving.add("b", prompt(2, 3), max_tokens=3)
    gone.add("match")
    # a's tokens up to 16, where its state is kept; there is room for b.
    output = serving.step()
    assert (output.request_ids.tolist(), output.num_scheduled.tolist()) == (["a"], [4])
    with pytest.raises(OSError, match="match: gone"):
        serving.schedule()
    gone.clear()
    assert set(serving.step().request_ids.tolist()) == {"a", "b"}
    serving.run()
    assert serving.requests["a"].output_token_ids.tolist() == continuation(prompt(1, 20), 3)
    assert serving.requests["b"].output_token_ids.tolist() == continuation(prompt(2, 3), 3)


@pytest.mark.parametrize("what", ["save", "save_computed"])
def test_results_are_not_lost_where_the_connector_does_not_save(what: str) -> None:
    gone = {what}
    serving = unreliable(gone.__contains__)
    serving.add("a", prompt(1, 4), max_tokens=1)
    serving.add("b", prompt(2, 3), max_tokens=4)
    serving.schedule()
    result = serving.update()
    assert [ended.request.request_id for ended in result.finished] == ["a"]
    assert len(result) == 2
    serving.kv.check_integrity()
    with pytest.raises(OSError, match=f"{what}: gone"):
        serving.schedule()
    gone.clear()
    serving.run()
    assert serving.requests["b"].output_token_ids.tolist() == continuation(prompt(2, 3), 4)
    assert serving.kv.num_free_blocks == 59


def test_loads_that_are_done_count_beside_what_was_not_asked_for() -> None:
    connector = SlowConnector(16)
    serving = slow(connector)
    serving.add("a", prompt(1, 20), max_tokens=2)
    serving.step()
    connector.done_loads = ["b", "a", "a"]
    for name in ("b", "a"):
        with pytest.raises(JaxkvError, match=f"done loading request '{name}', which it was not asked for"):
            serving.schedule()
    assert serving.step().request_ids.tolist() == ["a"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_an_unreliable_connector_changes_no_answer_and_keeps_no_block(seed: int, overlap: bool) -> None:
    rng = np.random.default_rng(seed)
    serving = unreliable(lambda what: rng.random() < 0.25, async_scheduling=overlap, max_num_seqs=4)
    prompts = {str(i): prompt(int(rng.integers(3)), int(rng.integers(1, 40))) for i in range(12)}
    answers = {name: continuation(tokens, int(rng.integers(1, 9))) for name, tokens in prompts.items()}
    num_errors = 0
    for name, tokens in prompts.items():
        serving.add(name, tokens, max_tokens=len(answers[name]))
    while serving.scheduler.has_unfinished_requests:
        try:
            serving.step()
        except OSError:
            num_errors += 1
            serving.kv.check_integrity()
    serving.drain()
    assert num_errors
    assert answers == {name: r.output_token_ids.tolist() for name, r in serving.requests.items()}
    # What its steps have completed is held until it has been offered.
    while serving.kv.num_free_blocks < 59:
        with suppress(OSError):
            serving.schedule()
            serving.drain()
    serving.kv.check_integrity()
