from jaxkv.planning import PlanConfig, make_plan
from jaxkv.planning.grouping import buckets_of, cut, group_size_rule
from jaxkv.planning.packing import least_padding_size
from jaxkv.specs import ScratchSpec
from tests.planning.layers import PAGE, chunked, full, layers, mamba, mla, window

CONFIG = PlanConfig(policy="unified", max_model_len=1024, max_num_batched_tokens=128, page_alignment_bytes=1)
MEMORY = 2**28


def test_group_size_is_the_smallest_count_or_the_largest_of_close_counts() -> None:
    assert group_size_rule([10, 52]) == 10
    assert group_size_rule([12, 13]) == 13
    assert group_size_rule([10, 15]) == 10  # 1.5 times is no longer close
    assert group_size_rule([10, 14]) == 14
    assert group_size_rule([7]) == 7


def test_layers_are_dealt_out_in_turn() -> None:
    buckets = buckets_of(layers((2, "full", full()), (5, "swa", window())))
    assert cut(buckets, 2) == [
        (0, ("full.0", "full.1")),
        (1, ("swa.0", "swa.3")),
        (1, ("swa.1", "swa.4")),
        (1, ("swa.2",)),
    ]


def test_one_spec_makes_one_group_whatever_its_layers_draft() -> None:
    plan = make_plan(layers((4, "layer", full())), CONFIG, MEMORY)
    assert [group.layer_names for group in plan.groups] == [tuple(f"layer.{i}" for i in range(4))]
    assert plan.layer_slots == 4
    assert plan.bytes_per_block == 4 * PAGE


def test_full_layers_with_unequal_heads_share_a_group_and_keep_their_own_pages() -> None:
    plan = make_plan(layers((3, "small", full()), (2, "large", full(heads=6))), CONFIG, MEMORY)
    assert len(plan.groups) == 1
    assert plan.bytes_per_block == 3 * PAGE + 2 * 3 * PAGE
    assert plan.page_size_bytes == PAGE
    assert plan.layer_location("small.2") == (0, 2, 1)
    assert plan.layer_location("large.0") == (0, 3, 3)
    assert plan.layer_location("large.1") == (0, 6, 3)
    assert plan.layer_slots == 9


def test_three_kinds_become_equal_groups_over_one_page_size() -> None:
    plan = make_plan(
        layers((4, "full", full()), (8, "swa", window(heads=4)), (12, "mamba", mamba(16_000))), CONFIG, MEMORY
    )
    assert [(g.spec.kind, len(g.layer_names), g.block_size) for g in plan.groups] == [
        ("full", 4, 32),
        ("sliding_window", 4, 16),
        ("sliding_window", 4, 16),
        ("mamba", 4, 16),
        ("mamba", 4, 16),
        ("mamba", 4, 16),
    ]
    assert plan.bytes_per_block == 4 * 2 * PAGE
    assert (plan.hash_block_size, plan.scheduler_block_size, plan.hit_alignment) == (16, 32, 32)


def test_hybrid_manager_off_accounts_windows_as_full_attention() -> None:
    config = PlanConfig(
        policy="unified", max_model_len=1024, page_alignment_bytes=1, disable_hybrid_kv_cache_manager=True
    )
    plan = make_plan(layers((4, "full", full()), (8, "swa", window())), config, MEMORY)
    (group,) = plan.groups
    assert group.spec.kind == "full"
    assert getattr(group.spec, "sliding_window", None) == 64
    assert plan.blocks_per_request == (64,)
    assert any("hybrid manager is off" in note for note in plan.notes)


def test_hybrid_manager_off_keeps_two_window_sizes_apart_in_one_group() -> None:
    config = PlanConfig(policy="unified", max_model_len=1024, disable_hybrid_kv_cache_manager=True)
    plan = make_plan(layers((2, "full", full()), (2, "a", window(64)), (2, "b", window(128))), config, MEMORY)
    (group,) = plan.groups
    assert [getattr(spec, "sliding_window", None) for spec in group.layer_specs] == [
        None,
        None,
        64,
        64,
        128,
        128,
    ]


def test_full_allocation_where_latent_pages_do_not_fit_window_pages() -> None:
    plan = make_plan(layers((4, "mla", mla()), (2, "draft", window(heads=6))), CONFIG, MEMORY)
    (group,) = plan.groups
    assert {spec.kind for spec in group.layer_specs} == {"mla", "full"}
    assert plan.blocks_per_request == (64,)
    assert plan.bytes_per_block == 4 * 16 * 576 * 2 + 2 * 16 * 6 * 128 * 2
    assert any("keep every token" in note for note in plan.notes)


def test_packing_puts_pages_of_several_sizes_side_by_side() -> None:
    # A pattern of (small full, large full) twice, and windows of one size: two repeats stay whole.
    pattern = {"f.0": full(), "g.0": full(heads=4), "f.1": full(), "g.1": full(heads=4)}
    config = PlanConfig(policy="unified", max_model_len=1024, page_alignment_bytes=1, pack_mixed_pages=True)
    plan = make_plan(pattern | layers((4, "swa", window())), config, MEMORY)
    assert [group.layer_names for group in plan.groups] == [
        ("f.0", "g.0", "f.1", "g.1"),
        ("swa.0", "swa.2"),
        ("swa.1", "swa.3"),
    ]
    assert plan.bytes_per_block == 2 * PAGE + 2 * 2 * PAGE
    assert plan.layer_location("g.0") == (0, 1, 2)


def test_packing_cuts_states_to_the_block_that_attention_needs() -> None:
    config = PlanConfig(policy="unified", max_model_len=1024, page_alignment_bytes=1, pack_mixed_pages=True)
    plan = make_plan(layers((2, "full", full()), (9, "mamba", mamba(PAGE // 2))), config, MEMORY)
    assert [len(group.layer_names) for group in plan.groups] == [2, 3, 3, 3]
    assert plan.bytes_per_block == 2 * PAGE


def test_packing_cuts_rings_of_two_sizes_and_leaves_no_group_empty() -> None:
    config = PlanConfig(policy="unified", max_model_len=1024, page_alignment_bytes=1, pack_mixed_pages=True)
    large, small = (ScratchSpec(block_size=16, num_kv_heads=heads, head_size=64) for heads in (8, 2))
    # Five pages hold one large ring, but not two: each of the two rings has a group of its own.
    plan = make_plan({"large": large, "small": small, "full": full()}, config, MEMORY)
    assert [group.layer_names for group in plan.groups] == [("large",), ("small",), ("full",)]
    assert plan.bytes_per_block == 4 * PAGE


def test_least_padding_size_by_hand() -> None:
    assert least_padding_size([10, 20], 1) == 10
    assert least_padding_size([3, 5], 1) == 1
    assert least_padding_size([3, 5], 3) == 3  # 3 + 6: one slot more; 4 or 5 cost four or two
    assert least_padding_size([4], 6) == 6


def test_chunked_and_full_layers_stay_apart() -> None:
    plan = make_plan(layers((3, "local", chunked()), (1, "full", full())), CONFIG, MEMORY)
    assert [(g.spec.kind, len(g.layer_names)) for g in plan.groups] == [
        ("chunked_local", 1),
        ("chunked_local", 1),
        ("chunked_local", 1),
        ("full", 1),
    ]


def test_no_layer_with_a_cache_makes_an_empty_plan() -> None:
    plan = make_plan({}, CONFIG, MEMORY)
    assert plan.groups == ()
    assert plan.bytes_per_block == 0
    assert (plan.num_blocks, plan.usable_blocks) == (1, 0)
