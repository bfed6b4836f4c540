"""Requests with an encoder's output: its blocks are counted, taken at the start, given back at the end."""

import pytest

from jaxkv.cache_manager import KVCacheManager
from jaxkv.errors import JaxkvError
from jaxkv.planning.plan import CacheGroup, CachePlan
from jaxkv.request import EncoderInput, Request
from jaxkv.scheduling import Scheduler, SchedulerConfig
from jaxkv.specs import CrossAttentionSpec, RequestLimits
from tests.scheduling.serving import full

CROSS = CrossAttentionSpec(num_kv_heads=1, head_size=8, block_size=4)


def serve(num_blocks: int) -> tuple[KVCacheManager, Scheduler]:
    """Self attention and cross attention in blocks of 4; an encoder of at most 20 tokens."""
    plan = CachePlan(
        policy="unified",
        groups=(
            CacheGroup(layer_names=("self",), spec=full()),
            CacheGroup(layer_names=("cross",), spec=CROSS),
        ),
        page_size_bytes=CROSS.page_size_bytes,
        layer_slots=1,
        num_blocks=num_blocks,
        limits=RequestLimits(max_model_len=64, max_in_flight_tokens=16, max_encoder_len=20),
        hash_block_size=4,
        scheduler_block_size=4,
    )
    cache = KVCacheManager(plan, max_num_seqs=4)
    return cache, Scheduler(plan, cache, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16))


def heard(identifier: str, length: int = 18) -> EncoderInput:
    return EncoderInput(identifier=identifier, length=length)


def step(scheduler: Scheduler) -> dict[str, int]:
    output = scheduler.schedule()
    scheduler.update_from_output(output, [7] * len(output.sampling))
    return output.num_scheduled_tokens()


def test_blocks_of_the_encoder_are_taken_once_and_given_back() -> None:
    cache, scheduler = serve(40)
    scheduler.add_request(Request("a", [1, 2, 3], 6, encoder_input=heard("speech")))
    step(scheduler)
    # 18 encoder tokens in blocks of 4, as vLLM's CrossAttentionManager counts them.
    tables = cache.get_block_ids("a")
    assert [len(ids) for ids in tables] == [1, 5]
    step(scheduler)
    step(scheduler)
    assert cache.get_block_ids("a")[1] == tables[1]
    while scheduler.has_unfinished_requests:
        step(scheduler)
    assert cache.num_free_blocks == 39
    cache.check_integrity()


def test_a_request_starts_only_when_its_encoder_blocks_fit() -> None:
    cache, scheduler = serve(15)
    for name in "ab":
        scheduler.add_request(Request(name, [1, 2, 3], 3, encoder_input=heard(name)))
    # Each takes 5 blocks for the encoder and 2 of its own by its end; the third would take 4 of the last 2.
    assert step(scheduler) == {"a": 3, "b": 3}
    scheduler.add_request(Request("c", [1, 2, 3], 3, encoder_input=heard("c", 12)))
    assert step(scheduler) == {"a": 1, "b": 1}
    while scheduler.has_unfinished_requests:
        step(scheduler)
    assert scheduler.stats.num_preemptions == 0
    assert cache.num_free_blocks == 14


def test_a_request_that_never_fits_is_refused_with_its_encoder_counted() -> None:
    _, scheduler = serve(6)
    scheduler.add_request(Request("short", [1, 2, 3], 1, encoder_input=heard("x", 12)))
    with pytest.raises(
        JaxkvError, match="take 6 blocks, but the pool has 5 usable blocks: at most 0 tokens fit"
    ):
        scheduler.add_request(Request("long", [1, 2, 3], 1, encoder_input=heard("x", 20)))
    with pytest.raises(JaxkvError, match="'more' has 21 encoder tokens, the plan is made for at most 20"):
        scheduler.add_request(Request("more", [1, 2, 3], 1, encoder_input=heard("x", 21)))


def test_the_cache_refuses_more_encoder_tokens_than_the_plan_has() -> None:
    cache, _ = serve(40)
    with pytest.raises(JaxkvError, match="'a' has 21 encoder tokens, the plan is made for at most 20"):
        cache.allocate_slots(Request("a", [1, 2]), 2, num_encoder_tokens=21)


def test_decoder_blocks_are_shared_only_where_the_encoder_read_the_same() -> None:
    cache, scheduler = serve(60)
    prompt = list(range(10))
    hits = []
    for name, encoder_input in (
        ("first", heard("speech")),
        ("same", heard("speech")),
        ("other", heard("music")),
        ("none", None),
    ):
        request = Request(name, prompt, 1, encoder_input=encoder_input)
        scheduler.add_request(request)
        step(scheduler)
        hits.append(request.num_cached_tokens)
    assert hits == [0, 8, 0, 0]
    assert cache.num_free_blocks == 59


def test_bad_encoder_inputs_are_refused() -> None:
    with pytest.raises(
        JaxkvError, match="length of an encoder input must be an integer of at least 1, not 0"
    ):
        heard("x", 0)
    with pytest.raises(JaxkvError, match="identifier of an encoder input must be text, not 5"):
        EncoderInput(identifier=5, length=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(JaxkvError, match="encoder_input must be a EncoderInput, not 'x'"):
        Request("a", [1], encoder_input="x")  # pyright: ignore[reportArgumentType]
