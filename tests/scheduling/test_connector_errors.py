"""What a connector may not do, does not bring, or raises: nothing is lost, nobody waits for ever."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest

from jaxkv.cache_manager import KVCacheManager
from jaxkv.cache_request import CacheRequest
from jaxkv.connector import ExternalMatch, InMemoryConnector, NamedBlocks
from jaxkv.errors import JaxkvError
from tests.scheduling.connectors import SlowConnector, Store, Unreliable, prompt, slow, unreliable
from tests.scheduling.serving import Serving, continuation, full, mamba, window


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


def test_what_a_step_in_flight_computes_is_not_offered_after_an_error() -> None:
    offered: list[int] = []

    class Counting(Unreliable):
        def save_computed(self, blocks: Sequence[NamedBlocks]) -> None:
            offered.append(len(blocks))
            super().save_computed(blocks)

    gone: set[str] = set()

    def connect(cache: KVCacheManager) -> Unreliable:
        return Counting(cache, gone.__contains__)

    serving = Serving([full()], 40, max_num_batched_tokens=64, async_scheduling=True, make_connector=connect)
    serving.add("a", prompt(1, 20), max_tokens=1)
    serving.schedule()
    serving.add("b", prompt(2, 9), max_tokens=2)
    gone.add("match")
    for _ in range(3):
        with pytest.raises(OSError, match="match: gone"):
            serving.schedule()
    assert sum(offered) == 0
    serving.update()
    # a's 20 tokens, in blocks of 4.
    assert sum(offered) == 5
    gone.clear()
    serving.run()
    assert serving.requests["b"].output_token_ids.tolist() == continuation(prompt(2, 9), 2)


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
