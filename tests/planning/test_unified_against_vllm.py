"""Policy `unified` forms the groups that vLLM forms: its recorded answers for random layer mixes."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxkv.errors import JaxkvError
from jaxkv.planning import PlanConfig, make_stage_plans
from jaxkv.specs import SPEC_KINDS, KVCacheSpec

CASES = json.loads((Path(__file__).parent / "data" / "vllm_plans.json").read_text())["cases"]


def stages_of(case: dict[str, Any]) -> list[dict[str, KVCacheSpec]]:
    specs = []
    for values in case["specs"]:
        fields = dict(values)
        specs.append(SPEC_KINDS[fields.pop("kind")](**fields))
    layers = [(f"layers.{i}", specs[index]) for i, index in enumerate(case["layers"])]
    stages, start = [], 0
    for length in case["stage_lengths"]:
        stages.append(dict(layers[start : start + length]))
        start += length
    return stages


def config_of(case: dict[str, Any]) -> PlanConfig:
    return PlanConfig(
        policy="unified",
        max_model_len=case["max_model_len"],
        max_num_batched_tokens=case["max_in_flight_tokens"],
        page_alignment_bytes=1,
        disable_hybrid_kv_cache_manager=case["hybrid_off"],
        pack_mixed_pages=case["packed"],
    )


@pytest.mark.parametrize(
    "case", [case for case in CASES if "answer" in case], ids=lambda case: f"seed {case['seed']}"
)
def test_partition_blocks_and_pages_equal_vllms(case: dict[str, Any]) -> None:
    stages = stages_of(case)
    plans = make_stage_plans(stages, config_of(case), [case["memory"]] * len(stages))
    wanted = case["answer"]

    assert [plan.num_blocks for plan in plans] == [wanted["num_blocks"]] * len(stages)
    assert [plan.bytes_per_block for plan in plans] == wanted["bytes_per_block"]
    for index, group in enumerate(wanted["groups"]):
        pages = {
            name: plan.groups[index].spec_of(i).page_size_bytes
            for plan in plans
            for i, name in enumerate(plan.groups[index].layer_names)
        }
        names = [f"layers.{i}" for i in group["layers"]]
        sizes = group["page"] if isinstance(group["page"], list) else [group["page"]] * len(names)
        assert pages == dict(zip(names, sizes, strict=True))
        assert {plan.groups[index].block_size for plan in plans} == {group["block_size"]}
    assert all(len(plan.groups) == len(wanted["groups"]) for plan in plans)
    if "hash_block_size" in wanted:
        assert plans[0].hash_block_size == wanted["hash_block_size"]
        assert plans[0].scheduler_block_size == wanted["scheduler_block_size"]


@pytest.mark.parametrize(
    "case", [case for case in CASES if "refused" in case], ids=lambda case: f"seed {case['seed']}"
)
def test_what_vllm_refuses_is_refused(case: dict[str, Any]) -> None:
    stages = stages_of(case)
    with pytest.raises(JaxkvError):
        make_stage_plans(stages, config_of(case), [case["memory"]] * len(stages))
