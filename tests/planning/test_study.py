import json

from jaxkv.planning import CachePlan, PlanConfig
from jaxkv.planning.machine import make_machine
from jaxkv.planning.study import HYBRID_OFF, PlanStudy, make_study, study_report
from jaxkv.planning.study_table import format_comparison, format_study
from tests.planning.layers import full, layers, mamba, window

CONFIG = PlanConfig(max_model_len=16384, max_num_batched_tokens=64)


def study(**changes) -> PlanStudy:
    mix = layers((2, "full", full()), (10, "swa", window(512)))
    machine = make_machine("h100", chips=4, tensor_parallel=2)
    return make_study("a model", mix, CONFIG, machine, 2**30, about={"cache_dtype": "bfloat16"}, **changes)


def test_every_way_to_plan_is_in_the_report() -> None:
    found = study()
    assert list(found.all_plans) == ["split", "unified", HYBRID_OFF]
    report = json.loads(json.dumps(study_report(found)))
    assert report["policy"] == "split"
    assert report["layers_by_kind"] == {"full": 2, "sliding_window 512": 10}
    assert report["bytes_per_token"] == 12 * 512
    assert report["machine"]["data_parallel"] == 2
    assert report["machine"]["requests_of_max_model_len"] == round(2 * found.plan.concurrency, 4)
    assert report["machine"]["figures"]["memory"]["source"]
    assert [entry["num_tokens"] for entry in report["lengths"]] == [1024, 8192, 16384]


def test_with_the_hybrid_manager_off_tokens_out_of_reach_are_lost() -> None:
    off = study_report(study())["other_plans"][HYBRID_OFF]
    at_8k = off["lengths"][1]
    held, needed = 12 * 8192, 2 * 8192 + 10 * 512
    assert abs(at_8k["mean_wasted_fraction"] - (1 - needed / held)) < 0.002


def test_a_way_that_is_refused_says_why() -> None:
    mix = layers((2, "full", full()), (2, "m", mamba()))
    found = make_study("b", mix, CONFIG, make_machine("cpu"), 2**30, about={"cache_dtype": "bfloat16"})
    assert "cannot be accounted as one full attention group" in str(found.others[HYBRID_OFF])
    assert isinstance(found.others["unified"], CachePlan)
    assert "refused" in study_report(found)["other_plans"][HYBRID_OFF]
    assert f"{HYBRID_OFF}: layers of kinds" in format_study(found)


def test_the_tables() -> None:
    text = format_study(study(warnings=("mind the gap",)))
    for part in (
        "side by side",
        "hybrid manager off",
        "4 x h100, tensor parallel 2",
        "warning: mind the gap",
    ):
        assert part in text
    lines = format_comparison([study(), study()]).splitlines()
    assert len(lines) == 3
    assert lines[1].split()[:2] == ["a", "model"]
