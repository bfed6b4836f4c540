import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.planning import CacheGroup, PlanConfig, make_plan, plan_from_groups, waste_of
from jaxkv.planning.grouping import buckets_of
from jaxkv.planning.split import GROUP_COST, best_group_size
from jaxkv.specs import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec, cdiv
from tests.planning.layers import PAGE, full, layers, mamba, window

CONFIG = PlanConfig(policy="split", max_model_len=8192, max_num_batched_tokens=256, page_alignment_bytes=1)


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


def test_a_large_state_spreads_over_pages_of_attention_size() -> None:
    plan = make_plan(layers((2, "full", full()), (4, "m", mamba(9 * PAGE + 1))), CONFIG, 2**28)
    states = [group for group in plan.groups if group.spec.kind == "mamba"]
    assert plan.page_size_bytes == PAGE
    assert {group.blocks_per_state for group in states} == {10}
    assert {group.block_size for group in plan.groups} == {16}
    assert plan.blocks_per_request == (512, 20, 20)  # two states of ten blocks each


def test_a_model_of_states_alone_has_pages_of_a_state() -> None:
    plan = make_plan(layers((8, "m", mamba(5000))), CONFIG, 2**24)
    (group,) = plan.groups
    assert (plan.page_size_bytes, group.blocks_per_state, plan.layer_slots) == (5000, 1, 8)


@settings(max_examples=40, deadline=None)
@given(
    num_full=st.integers(1, 9),
    num_window=st.integers(0, 9),
    num_states=st.integers(0, 9),
    state=st.integers(1, 3),
)
def test_the_group_size_has_the_lowest_cost_of_all(
    num_full: int, num_window: int, num_states: int, state: int
) -> None:
    mix = layers(
        (num_full, "full", full()),
        (num_window, "swa", window(512)),
        (num_states, "m", mamba(state * PAGE - 7)),
    )

    def cost(size: int) -> float:
        """Waste of the plan really built with this group size, and its groups."""
        groups = []
        for prefix, count in (("full", num_full), ("swa", num_window), ("m", num_states)):
            names = [f"{prefix}.{i}" for i in range(count)]
            for start in range(0, count, size):
                spec = mix[names[0]]
                if prefix == "m" and state == 1:
                    spec = spec.padded_to(PAGE)
                per_state = state if prefix == "m" else 1
                chosen = tuple(names[start : start + size])
                groups.append(CacheGroup(layer_names=chosen, spec=spec, blocks_per_state=per_state))
        plan = plan_from_groups(groups, 10, CONFIG)
        held = waste_of(plan, 8192)
        slots = sum(
            cdiv(512 if g.spec.kind == "full" else 32 if g.spec.kind == "sliding_window" else 2 * state, 1)
            for g in groups
        )
        assert held.held_bytes == slots * plan.layer_slots * PAGE
        missing = (size - plan.layer_slots) * slots * PAGE  # sizes above every kind's count
        return 1 - held.needed_bytes / (held.held_bytes + missing) + GROUP_COST * len(groups)

    chosen = best_group_size(buckets_of(mix), PAGE, CONFIG.limits)
    largest = max(num_full, num_window, num_states)
    assert cost(chosen) == pytest.approx(min(cost(size) for size in range(1, largest + 1)), abs=1e-12)
