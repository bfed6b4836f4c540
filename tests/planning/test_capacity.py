import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.errors import JaxkvError
from jaxkv.planning import CacheGroup, PlanConfig, make_plan, plan_from_groups, steady_concurrency
from jaxkv.planning.capacity import in_flight_reserve, longest_at_once, longest_fitting
from jaxkv.specs import KVCacheSpec
from tests.planning.layers import PAGE, chunked, full, layers, mamba, window


def test_concurrency_counts_usable_blocks_only() -> None:
    # 160 tokens: 10 blocks, and 31 + 16 contiguous tokens touch at most 4; 99 of 100 blocks are usable.
    config = PlanConfig(max_model_len=160, max_num_batched_tokens=16, num_gpu_blocks_override=100)
    plan = make_plan({"full": full(), "swa": window(32)}, config, 2**34)
    assert plan.blocks_per_request == (10, 4)
    assert plan.usable_blocks == 99
    assert round(plan.concurrency, 2) == 7.07


def test_steady_concurrency_reserves_tokens_in_flight_once() -> None:
    # A decoding request holds 10 + 3. Two tokens more make a window touch a fourth block: with seven
    # requests the nine spare tokens add 4 blocks at most, so 7 * 13 + 4 of 99 are held and no eighth fits.
    config = PlanConfig(max_model_len=160, max_num_batched_tokens=16, num_gpu_blocks_override=100)
    steady = steady_concurrency(make_plan({"full": full(), "swa": window(32)}, config, 2**34))
    assert steady.blocks_per_request == (10, 3)
    assert steady.reserved_blocks == 4
    assert math.floor(steady.requests) == 7


def test_the_longest_length_that_many_requests_may_have() -> None:
    # 99 usable blocks for 9 requests: 11 blocks each, of which the window takes 3 (31 + 1 tokens).
    config = PlanConfig(max_model_len=160, max_num_batched_tokens=9, num_gpu_blocks_override=100)
    plan = make_plan({"full": full(), "swa": window(32)}, config, 2**34)
    assert longest_at_once(plan, 9) == 8 * 16
    assert longest_at_once(plan, 50) == 0
    assert longest_at_once(plan, 1) == 160


def most_extra_blocks(spec: KVCacheSpec, limits: PlanConfig, num_requests: int) -> int:
    """Brute force: the best way to give the tokens in flight to the requests, at least one each."""

    def blocks(tokens: int) -> int:
        return spec.max_blocks_per_request(dataclasses.replace(limits.limits, max_in_flight_tokens=tokens))

    tokens = limits.limits.max_in_flight_tokens
    best = {0: 0}  # tokens given away -> most blocks
    for _ in range(num_requests):
        grown: dict[int, int] = {}
        for used, held in best.items():
            for more in range(1, tokens - used + 1):
                grown[used + more] = max(grown.get(used + more, 0), held + blocks(more))
        best = grown
    return max(best.values()) - num_requests * blocks(1)


@given(
    kind=st.sampled_from([window, chunked]),
    reach=st.integers(1, 24),
    block_size=st.integers(1, 8),
    in_flight=st.integers(1, 14),
    max_model_len=st.integers(1, 60),
    num_requests=st.integers(1, 5),
)
def test_the_in_flight_reserve_covers_the_worst_split(
    kind, reach: int, block_size: int, in_flight: int, max_model_len: int, num_requests: int
) -> None:
    in_flight = max(in_flight, num_requests)
    spec = kind(reach, block_size)
    config = PlanConfig(max_model_len=max_model_len, max_num_batched_tokens=in_flight)
    worst = most_extra_blocks(spec, config, num_requests)
    reserve = in_flight_reserve(CacheGroup(layer_names=("a",), spec=spec), config.limits, num_requests)
    assert reserve >= worst
    if max_model_len >= reach + in_flight + 2 * block_size:  # the length cuts nothing off
        assert reserve == worst


@given(
    memory_blocks=st.integers(2, 200),
    max_model_len=st.integers(1, 3000),
    in_flight=st.integers(1, 200),
    window_size=st.integers(1, 300),
)
def test_auto_fit_finds_the_longest_request_that_fits(
    memory_blocks: int, max_model_len: int, in_flight: int, window_size: int
) -> None:
    groups = [
        CacheGroup(layer_names=("f",), spec=full()),
        CacheGroup(layer_names=("w",), spec=window(window_size)),
        CacheGroup(layer_names=("m",), spec=mamba()),
    ]
    limits = PlanConfig(max_model_len=max_model_len, max_num_batched_tokens=in_flight).limits
    lengths = range(1, max_model_len + 1, 1 if max_model_len < 300 else 7)

    def needed(length: int) -> int:
        short = dataclasses.replace(limits, max_model_len=length)
        return sum(group.spec.max_blocks_per_request(short) for group in groups)

    found = longest_fitting(groups, limits, memory_blocks)
    assert found == 0 or needed(found) <= memory_blocks
    assert all(needed(length) > memory_blocks for length in lengths if length > found)


def test_auto_fit_lowers_the_maximum_and_says_so() -> None:
    config = PlanConfig(max_model_len=100_000, auto_fit_max_model_len=True, page_alignment_bytes=1)
    plan = make_plan(layers((2, "full", full())), config, 101 * 2 * PAGE)
    assert plan.max_model_len == 1600
    assert any("from 100000 to 1600" in note for note in plan.notes)


def test_memory_for_no_block_names_the_least() -> None:
    with pytest.raises(JaxkvError, match=r"12 KiB holds no usable block.*8 KiB.*16 KiB.*block_size"):
        make_plan({"a": full()}, PlanConfig(max_model_len=16), 12 * 1024)


def test_memory_for_no_request_names_the_shortfall_and_the_setting() -> None:
    with pytest.raises(
        JaxkvError,
        match=r"needs 64 blocks of 8 KiB, the pool has 9 usable: 440 KiB short.*max_model_len to 144",
    ):
        make_plan({"a": full()}, PlanConfig(max_model_len=1024), 10 * PAGE)


def test_states_that_never_fit_are_refused_even_with_auto_fit() -> None:
    config = PlanConfig(max_model_len=64, auto_fit_max_model_len=True, page_alignment_bytes=1)
    with pytest.raises(JaxkvError, match=r"needs 6 blocks .* the pool has 1 usable"):
        make_plan(layers((1, "full", full()), (1, "m", mamba())), config, 2 * PAGE)


@pytest.mark.parametrize("memory", [0, -5, True, 1.5])
def test_memory_must_be_bytes(memory) -> None:
    with pytest.raises(JaxkvError, match="at least 1 byte"):
        make_plan({"a": full()}, PlanConfig(max_model_len=16), memory)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_model_len", 0),
        ("max_num_batched_tokens", -1),
        ("max_num_seqs", True),
        ("page_alignment_bytes", 0),
        ("num_gpu_blocks_override", 1),
        ("prefix_match_unit", 0),
    ],
)
def test_config_values_below_their_least_are_refused(field: str, value: int) -> None:
    with pytest.raises(JaxkvError, match=f"{field} must be an integer of at least .*{value}"):
        dataclasses.replace(PlanConfig(), **{field: value})


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([full()], "layers must be a Mapping, not "),
        ({"a": 16}, "what layer a keeps must be a KVCacheSpec, not 16"),
        ({3: full()}, "every layer's name must be a str, not 3"),
    ],
)
def test_layers_that_are_none_are_refused(layers: Any, message: str) -> None:
    with pytest.raises(JaxkvError, match=message):
        make_plan(layers, PlanConfig(), 2**20)


def test_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(JaxkvError, match="unknown policy 'best'; known are unified, split"):
        make_plan({"a": full()}, PlanConfig(policy="best"), 2**20)


def test_hash_block_divides_and_scheduler_block_covers_all_groups() -> None:
    groups = [CacheGroup(layer_names=(str(b),), spec=full(block_size=b)) for b in (8, 12)]
    plan = plan_from_groups(groups, 10, PlanConfig(page_alignment_bytes=1))
    assert (plan.hash_block_size, plan.scheduler_block_size, plan.hit_alignment) == (4, 24, 24)
    fine = plan_from_groups(groups, 10, PlanConfig(page_alignment_bytes=1, prefix_match_unit=2))
    assert (fine.hash_block_size, fine.hit_alignment) == (2, 2)
    with pytest.raises(JaxkvError, match=r"prefix_match_unit 8 must divide .* 12 tokens"):
        plan_from_groups(groups, 10, PlanConfig(prefix_match_unit=8))


def test_states_that_are_not_kept_hash_by_the_scheduler_block() -> None:
    groups = [
        CacheGroup(layer_names=("f",), spec=full(block_size=8)),
        CacheGroup(layer_names=("m",), spec=mamba(block_size=16, mode="none")),
    ]
    plan = plan_from_groups(groups, 10, PlanConfig(page_alignment_bytes=1))
    assert (plan.hash_block_size, plan.scheduler_block_size) == (16, 16)


def test_context_parallelism_multiplies_the_blocks_it_spreads() -> None:
    groups = [
        CacheGroup(layer_names=("f",), spec=full(block_size=8)),
        CacheGroup(layer_names=("m",), spec=mamba(block_size=8)),
    ]
    plan = plan_from_groups(groups, 10, PlanConfig(decode_context_parallel_size=4))
    assert (plan.hash_block_size, plan.scheduler_block_size) == (8, 32)


def test_draft_layers_mark_their_group_under_eagle() -> None:
    draft = dataclasses.replace(window(), is_draft=True)
    mix = {"full.0": full(), "full.1": full(), "swa.0": window(), "draft.0": draft}
    plan = make_plan(mix, PlanConfig(max_model_len=64, use_eagle=True), 2**24)
    assert [group.is_eagle_group for group in plan.groups] == [False, True]
    plain = make_plan(mix, PlanConfig(max_model_len=64), 2**24)
    assert not any(group.is_eagle_group for group in plain.groups)


def test_an_unknown_layer_has_no_location() -> None:
    plan = make_plan({"a": full()}, PlanConfig(max_model_len=64), 2**24)
    with pytest.raises(JaxkvError, match="holds no layer 'b'"):
        plan.layer_location("b")


def test_a_policy_that_is_no_name_is_refused_where_it_is_said() -> None:
    wrong: Any = ["split"]
    with pytest.raises(JaxkvError, match=r"policy must be a str, not \['split'\]"):
        PlanConfig(policy=wrong, max_model_len=64)
