import json

from jaxkv.planning import PlanConfig, make_plan, waste_of
from jaxkv.planning.report import plan_report
from jaxkv.planning.table import format_plan, short_names
from tests.planning.layers import PAGE, full, layers, mamba, window

CONFIG = PlanConfig(policy="unified", max_model_len=2048, max_num_batched_tokens=64, page_alignment_bytes=1)


def test_the_report_is_json_and_states_the_plan() -> None:
    plan = make_plan(layers((1, "full", full()), (3, "swa", window())), CONFIG, 1000 * PAGE)
    report = json.loads(json.dumps(plan_report(plan)))
    assert report["usable_blocks"] == 999
    assert report["pool_bytes"] == 1000 * PAGE
    assert [group["blocks_per_request"] for group in report["groups"]] == [128, 9, 9, 9]
    assert report["concurrency"] == round(999 / 155, 4)
    assert [waste["num_tokens"] for waste in report["waste"]] == [1024, 2048]
    assert report["waste"][0]["held_bytes"] == waste_of(plan, 1024).held_bytes
    assert report["smallest_prefix_that_can_hit"] == 16


def test_the_table_names_groups_capacity_waste_and_notes() -> None:
    plan = make_plan(
        layers((2, "full", full()), (3, "swa", window()), (2, "m", mamba(9))), CONFIG, 1000 * PAGE
    )
    text = format_plan(plan, "a model")
    assert text.startswith("a model\n")
    for part in ("sliding_window 64", "swa.0, 2", "empty layer slots", "at once, guaranteed", "note: "):
        assert part in text
    assert f"{plan.usable_blocks:,} usable blocks + the null block" in text


def test_the_table_of_a_model_without_cache() -> None:
    assert "no layer keeps a cache" in format_plan(make_plan({}, CONFIG, 2**20), "an encoder")


def test_layer_names_are_shortened() -> None:
    assert short_names(["layers.0", "layers.6"]) == "layers.0, 6"
    assert short_names([f"layers.{i}" for i in range(10)]) == "layers.0, 1, 2, 3, 4, 5, ..., 9"
    assert short_names(["a.0", "b.1"]) == "a.0, b.1"
    assert short_names(["model.3.x"]) == "model.3.x"
    assert short_names([]) == ""
