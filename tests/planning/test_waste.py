import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.planning import PlanConfig, make_plan, waste_by_group, waste_of
from jaxkv.planning.waste import held_blocks, needed_tokens
from jaxkv.specs import AttentionSpec, RequestLimits
from tests.planning.layers import PAGE, chunked, full, layers, mamba, window

CONFIG = PlanConfig(policy="unified", max_model_len=4096, max_num_batched_tokens=256, page_alignment_bytes=1)


def test_every_cause_by_hand() -> None:
    # Kinds of 2, 3 and 1 layers, so groups of one layer; every page has PAGE bytes.
    plan = make_plan(
        layers((2, "full", full()), (3, "swa", window(40)), (1, "m", mamba(PAGE - 100))),
        CONFIG,
        2**26,
    )
    assert [len(group.layer_names) for group in plan.groups] == [1] * 6
    token = PAGE // 16
    by_group = waste_by_group(plan, 100)
    # Full: 100 of 7 * 16 tokens.
    assert by_group[0].needed_bytes == 100 * token
    assert by_group[0].block_tail == 12 * token
    # Window 40: the step for token 99 reads tokens 60..99, which lie in blocks 3..6.
    assert by_group[2].needed_bytes == 40 * token
    assert by_group[2].block_tail == 24 * token
    # Mamba: one state needed, one reserved, 100 bytes of padding in each of two pages.
    assert by_group[5].needed_bytes == PAGE - 100
    assert by_group[5].reserved_states == PAGE - 100
    assert by_group[5].page_padding == 200
    assert waste_of(plan, 100).padding_layers == 0


def test_empty_slots_of_gemma_3_27b() -> None:
    # 52 window layers in six groups of 10: 8 slots stay empty under 64 blocks each, at 8,192 tokens.
    plan = make_plan(layers((10, "full", full()), (52, "swa", window(1024))), CONFIG, 2**30)
    waste = waste_of(plan, 8192)
    assert waste.padding_layers == 8 * 64 * PAGE
    assert waste.needed_bytes == (10 * 8192 + 52 * 1024) * PAGE // 16
    assert waste.wasted_fraction == pytest.approx(0.0571, abs=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    counts=st.tuples(*[st.integers(0, 7)] * 4).filter(any),
    num_tokens=st.integers(1, 4096),
    state=st.integers(1, 3 * PAGE),
    policy=st.sampled_from(["unified", "split"]),
    alignment=st.sampled_from([1, 4096]),
)
def test_the_parts_sum_to_the_bytes_of_the_blocks_held(
    counts: tuple[int, ...], num_tokens: int, state: int, policy: str, alignment: int
) -> None:
    mix = layers(
        (counts[0], "full", full()),
        (counts[1], "swa", window(100, heads=4)),
        (counts[2], "local", chunked(96)),
        (counts[3], "mamba", mamba(state)),
    )
    config = PlanConfig(
        policy=policy, max_model_len=4096, max_num_batched_tokens=256, page_alignment_bytes=alignment
    )
    plan = make_plan(mix, config, 2**32)
    held = sum(
        held_blocks(group.spec, num_tokens, plan.limits) * group.blocks_per_state for group in plan.groups
    )
    waste = waste_of(plan, num_tokens)
    assert waste.held_bytes == held * plan.bytes_per_block
    assert min(waste.padding_layers, waste.page_padding, waste.block_tail, waste.reserved_states) >= 0
    for group in plan.groups:
        assert held_blocks(group.spec, num_tokens, plan.limits) <= group.spec.max_blocks_per_request(
            plan.limits
        )


@given(
    kind=st.sampled_from([window, chunked]),
    reach=st.integers(1, 40),
    block_size=st.integers(1, 9),
    num_tokens=st.integers(1, 200),
)
def test_held_blocks_are_those_of_the_tokens_the_last_step_reads(
    kind, reach: int, block_size: int, num_tokens: int
) -> None:
    spec = kind(reach, block_size)
    last = num_tokens - 1
    first = max(last - reach + 1, 0) if kind is window else last // reach * reach
    read = range(first, num_tokens)
    limits = RequestLimits(max_model_len=200, max_in_flight_tokens=1)
    assert isinstance(spec, AttentionSpec)
    assert needed_tokens(spec, num_tokens, limits) == len(read)
    assert held_blocks(spec, num_tokens, limits) == len({token // block_size for token in read})
