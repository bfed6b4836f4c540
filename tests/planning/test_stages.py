import pytest

from jaxkv.errors import JaxkvError
from jaxkv.planning import PlanConfig, make_stage_plans
from tests.planning.layers import PAGE, full, layers, window

CONFIG = PlanConfig(policy="unified", max_model_len=256, max_num_batched_tokens=64, page_alignment_bytes=1)


def test_stages_agree_on_groups_and_take_the_fewest_blocks() -> None:
    first = {"full.0": full(), "swa.0": window(), "swa.1": window()}
    second = {"full.1": full(), "swa.2": window(), "swa.3": window(), "swa.4": window()}
    plans = make_stage_plans([first, second], CONFIG, [100 * PAGE, 1000 * PAGE])
    names = [[group.layer_names for group in plan.groups] for plan in plans]
    assert names == [
        [("full.0",), ("swa.0",), ("swa.1",), ()],
        [("full.1",), ("swa.3",), ("swa.4",), ("swa.2",)],
    ]
    assert [plan.layer_slots for plan in plans] == [1, 1]
    assert [plan.num_blocks for plan in plans] == [100, 100]


def test_a_stage_with_more_layers_of_a_group_has_more_slots() -> None:
    stages = [layers((4, "a", full())), layers((2, "b", full()))]
    plans = make_stage_plans(stages, CONFIG, [400 * PAGE, 400 * PAGE])
    assert [plan.bytes_per_block for plan in plans] == [4 * PAGE, 2 * PAGE]
    assert [plan.num_blocks for plan in plans] == [100, 100]
    assert plans[1].layer_location("b.1") == (0, 1, 1)


def test_one_layer_with_two_specs_is_refused() -> None:
    with pytest.raises(JaxkvError, match=r"layer a keeps .* on one stage"):
        make_stage_plans([{"a": full()}, {"a": window()}], CONFIG, [2**20, 2**20])


def test_as_many_memory_sizes_as_stages() -> None:
    with pytest.raises(JaxkvError, match="2 stages need as many memory sizes, got 1"):
        make_stage_plans([{"a": full()}, {"b": full()}], CONFIG, [2**20])
