import dataclasses
from collections.abc import Iterator
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.errors import JaxkvError
from jaxkv.planning import CacheGroup, CachePlan, PlanConfig, make_plan, plan_from_groups, waste_of
from jaxkv.planning.grouping import Bucket
from jaxkv.planning.split_search import (
    GROUP_COST,
    MAX_GROUPS,
    REFERENCE_LENGTHS,
    SearchCase,
    best_layout,
)
from jaxkv.specs import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    ScratchSpec,
    SlidingWindowSpec,
    cdiv,
)
from tests.planning.layers import PAGE, full, layers, mamba, mla, window

CONFIG = PlanConfig(policy="split", max_model_len=16384, max_num_batched_tokens=256, page_alignment_bytes=1)


def lfm3() -> dict[str, KVCacheSpec]:
    """LFM3 1.7B: 13 short convolutions, 6 full and 5 window layers."""
    conv = MambaSpec(block_size=16, shapes=((2048, 6),), dtypes=("bfloat16",))
    swa = SlidingWindowSpec(block_size=16, num_kv_heads=4, head_size=128, sliding_window=256)
    return layers(
        (13, "conv", conv),
        (6, "full", FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=128)),
        (5, "swa", swa),
    )


@pytest.mark.parametrize("alignment", [1, 4096])
def test_lfm3_loses_under_two_percent_where_the_smallest_kind_rule_loses_forty(alignment: int) -> None:
    split = PlanConfig(policy="split", max_model_len=32768, page_alignment_bytes=alignment)
    unified = PlanConfig(policy="unified", max_model_len=32768, page_alignment_bytes=alignment)
    memory = 2**34
    assert waste_of(make_plan(lfm3(), split, memory), 8192).wasted_or_reserved_fraction < 0.02
    assert waste_of(make_plan(lfm3(), unified, memory), 8192).wasted_fraction == pytest.approx(
        0.395, abs=0.005
    )
    assert make_plan(lfm3(), split, memory).concurrency > 1.5 * make_plan(lfm3(), unified, memory).concurrency


def test_states_follow_each_other_page_by_page_through_the_blocks_of_one_group() -> None:
    # Two states of 4 layers, each 10 pages: 40 pages in 20 blocks of 2 layer slots.
    plan = make_plan(layers((2, "full", full()), (4, "m", mamba(9 * PAGE + 1))), CONFIG, 2**28)
    attention, states = plan.groups
    assert (plan.page_size_bytes, plan.layer_slots) == (PAGE, 2)
    assert (attention.blocks_per_state, states.blocks_per_state) == (1, 20)
    assert plan.blocks_per_request == (1024, 40)
    places = [plan.layer_location(f"m.{i}") for i in range(4)]
    assert [(place.slot, place.num_slots) for place in places] == [(0, 10), (10, 10), (20, 10), (30, 10)]


@given(num_full=st.integers(1, 5), num_states=st.integers(1, 7), state=st.integers(1, 5 * PAGE))
@settings(max_examples=60, deadline=None)
def test_no_two_layers_share_a_page(num_full: int, num_states: int, state: int) -> None:
    plan = make_plan(layers((num_full, "full", full()), (num_states, "m", mamba(state))), CONFIG, 2**30)
    for index, group in enumerate(plan.groups):
        pages = [
            (place.slot + k) // plan.layer_slots * plan.layer_slots + (place.slot + k) % plan.layer_slots
            for place in (plan.layer_location(name) for name in group.layer_names)
            for k in range(place.num_slots)
        ]
        assert len(set(pages)) == len(pages)
        assert max(pages) < group.blocks_per_state * plan.layer_slots
        assert plan.layer_location(group.layer_names[0]).group == index


def test_kinds_with_fewer_bytes_a_token_get_more_tokens_a_page_and_blocks_divide_each_other() -> None:
    mix = layers((4, "swa", window(512, heads=6)), (4, "full", full(heads=2)), (4, "mla", mla(rank=64)))
    plan = make_plan(mix, CONFIG, 2**30)
    blocks = {group.spec.kind: group.block_size for group in plan.groups}
    assert blocks == {"sliding_window": 16, "full": 48, "mla": 192}
    assert {group.spec.page_size_bytes for group in plan.groups} == {3 * PAGE}
    assert plan.hit_alignment == 192


def test_states_are_kept_only_where_a_hit_can_end() -> None:
    mix = layers((4, "full", full(heads=1)), (4, "swa", window(512, heads=4)), (2, "m", mamba(PAGE)))
    plan = make_plan(mix, CONFIG, 2**30)
    blocks = {group.spec.kind: group.block_size for group in plan.groups}
    assert blocks == {"full": 64, "sliding_window": 16, "mamba": 64}
    assert plan.scheduler_block_size == 64


def test_a_block_grows_where_a_page_would_not_fill_whole_tiles() -> None:
    # 16 tokens of a latent cache of 576 elements are 18,432 bytes, four and a half tiles.
    config = PlanConfig(policy="split", max_model_len=16384)
    plan = make_plan(layers((61, "mla", mla(rank=576))), config, 2**32)
    assert (plan.groups[0].block_size, plan.page_size_bytes, plan.layer_slots) == (32, 36864, 61)
    assert any("grow from 16 to 32 tokens" in note for note in plan.notes)


def test_latent_caches_of_two_sizes_stand_side_by_side_where_that_loses_less() -> None:
    mix = layers((3, "mla", mla(rank=576)), (3, "indexer", mla(rank=66)))
    plan = make_plan(mix, CONFIG, 2**30)
    assert len(plan.groups) == 1
    assert waste_of(plan, 8192).lost_bytes == 0


def test_the_alignment_of_a_latent_cache_is_kept() -> None:
    latent = MLASpec(block_size=16, head_size=576, alignment=512)
    plan = make_plan(layers((2, "mla", latent), (1, "full", full())), CONFIG, 2**30)
    assert plan.page_size_bytes % 512 == 0
    odd = MLASpec(block_size=16, head_size=576, alignment=576)
    config = PlanConfig(policy="split", page_alignment_bytes=512)
    with pytest.raises(JaxkvError, match="page_alignment_bytes 512 and the alignment 576"):
        make_plan(layers((2, "mla", odd), (1, "full", full())), config, 2**30)


def test_a_scratch_ring_keeps_its_length_and_may_span_pages() -> None:
    ring = ScratchSpec(block_size=40, num_kv_heads=2, head_size=64)
    plan = make_plan(layers((2, "full", full()), (2, "ring", ring)), CONFIG, 2**30)
    assert plan.groups[1].block_size == 40
    assert plan.layer_location("ring.1") == (1, 3, 3)


@pytest.mark.parametrize("max_encoder_len", [0, 20])
def test_cross_attention_alone_has_a_plan_for_encoders_of_any_length(max_encoder_len: int) -> None:
    small, large = (CrossAttentionSpec(block_size=16, num_kv_heads=h, head_size=64) for h in (2, 6))
    config = dataclasses.replace(CONFIG, max_encoder_len=max_encoder_len)
    plan = make_plan({"small": small, "large": large}, config, 2**20)
    assert {spec for group in plan.groups for spec in (group.layer_specs or [group.spec])} >= {small, large}
    assert sum(plan.blocks_per_request) == (2 if max_encoder_len else 0) * len(plan.groups)


def test_a_model_of_states_alone_has_pages_of_a_state() -> None:
    plan = make_plan(layers((8, "m", mamba(5000))), CONFIG, 2**24)
    (group,) = plan.groups
    assert (plan.page_size_bytes, group.blocks_per_state, plan.layer_slots) == (5000, 1, 8)


def test_the_hybrid_manager_off() -> None:
    config = PlanConfig(policy="split", max_model_len=1024, disable_hybrid_kv_cache_manager=True)
    plan = make_plan(layers((2, "full", full()), (3, "swa", window(64))), config, 2**28)
    assert [len(group.layer_names) for group in plan.groups] == [5]
    with pytest.raises(JaxkvError, match="leave disable_hybrid_kv_cache_manager off"):
        make_plan(layers((2, "full", full()), (3, "m", mamba())), config, 2**28)


def test_gemma_3_270m_has_one_slot_a_layer_and_no_waste() -> None:
    swa = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=256, sliding_window=512)
    mix = layers(
        (15, "swa", swa), (3, "full", FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=256))
    )
    plan = make_plan(mix, PlanConfig(max_model_len=32768), 2**30)
    assert plan.policy == "split"
    assert {place.num_slots for place in plan.locations.values()} == {1}
    assert (len(plan.groups), plan.layer_slots, plan.page_size_bytes) == (6, 3, 16384)
    assert waste_of(plan, 8192).lost_bytes == 0


def test_no_more_groups_than_the_limit_where_there_is_a_choice() -> None:
    spec = full()
    case = SearchCase(
        growing=(
            Bucket(tuple(f"a{i}" for i in range(61)), spec),
            Bucket(tuple(f"b{i}" for i in range(62)), window(512)),
        ),
        fixed=(),
        alignment=1,
        limits=CONFIG.limits,
    )
    assert best_layout(case).num_groups <= MAX_GROUPS


def cost(plan: CachePlan) -> float:
    """The stated cost, from the waste of a plan that was really built."""
    lost = [waste_of(plan, length).wasted_fraction for length in REFERENCE_LENGTHS]
    return sum(lost) / len(lost) + GROUP_COST * len(plan.groups)


def plans_by_hand(
    growing: list[tuple[int, KVCacheSpec]], state: tuple[int, int], alignment: int
) -> Iterator[CachePlan]:
    """Plans with every page, every chain of block sizes that divide each other, and every group size."""
    config = PlanConfig(policy="split", max_model_len=16384, page_alignment_bytes=alignment)
    sizes = [spec.page_size_bytes for _, spec in growing]
    for size, multiple in product(sizes, (1, 2, 3, 4)):
        page = cdiv(size * multiple, alignment) * alignment
        options = [range(1, min(page // s, 8) + 1) for s in sizes]
        for factors in product(*options):
            ordered = sorted(factors)
            if any(large % small for small, large in pairwise(ordered)):
                continue
            for group_size in range(1, max(count for count, _ in growing) + 1):
                groups = []
                for kind, ((count, spec), factor) in enumerate(zip(growing, factors, strict=True)):
                    names = [f"{kind}.{i}" for i in range(count)]
                    num_groups = cdiv(count, group_size)
                    resized = spec.with_block_size(16 * factor).padded_to(page)
                    groups += [
                        CacheGroup(layer_names=tuple(names[g::num_groups]), spec=resized)
                        for g in range(num_groups)
                    ]
                slots = max(len(group.layer_names) for group in groups)
                if state[0]:
                    pages = cdiv(state[1], page)
                    groups.append(
                        CacheGroup(
                            layer_names=tuple(f"m.{i}" for i in range(state[0])),
                            spec=mamba(state[1]).padded_to(pages * page),
                            blocks_per_state=cdiv(state[0] * pages, slots),
                        )
                    )
                yield plan_from_groups(groups, 10, config)


@settings(max_examples=12, deadline=None)
@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    heads=st.permutations([1, 2, 3, 4]),
    reach=st.sampled_from([100, 512, 2000]),
    state=st.tuples(st.integers(0, 5), st.integers(1, 5 * PAGE)),
    alignment=st.sampled_from([1, 4096]),
)
def test_no_plan_made_by_hand_costs_less(
    counts: list[int], heads: list[int], reach: int, state: tuple[int, int], alignment: int
) -> None:
    specs = [full(heads=heads[0]), window(reach, heads=heads[1]), window(2 * reach, heads=heads[2])]
    growing = list(zip(counts, specs, strict=False))
    mix = layers(
        *((count, str(i), spec) for i, (count, spec) in enumerate(growing)), (state[0], "m", mamba(state[1]))
    )
    config = PlanConfig(policy="split", max_model_len=16384, page_alignment_bytes=alignment)
    searched = cost(make_plan(mix, config, 2**34))
    cheapest = min(cost(plan) for plan in plans_by_hand(growing, state, alignment))
    assert searched <= cheapest + 1e-9
