"""Scenario files are read strictly: what is unknown, missing or out of range is refused by name."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from jaxkv.errors import JaxkvError
from jaxkv.scenario.config import ScenarioConfig, parse_config
from jaxkv.scenario.scenario import load_scenario, parse_scenario
from jaxkv.specs import FullAttentionSpec, MambaSpec, SlidingWindowSpec

FULL = {"kind": "full", "num_kv_heads": 2, "head_size": 64}
REPLAY: dict[str, Any] = {
    "mode": "replay",
    "config": {"max_model_len": 64},
    "groups": [{"spec": FULL}],
    "num_blocks": 10,
    "ops": [{"op": "new", "id": "a", "tokens": [1, 2, 3]}, {"op": "prefill", "id": "a"}],
}
PLAN: dict[str, Any] = {"mode": "plan", "layers": [{"name": "full", **FULL}], "available_memory": 1 << 20}


def changed(base: dict[str, Any], path: list[Any], value: Any) -> dict[str, Any]:
    result = copy.deepcopy(base)
    place: Any = result
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return result


def test_config_defaults_are_those_of_the_format() -> None:
    config = parse_config({})
    assert config == ScenarioConfig()
    assert (config.policy, config.max_model_len, config.block_size) == ("unified", 8192, 16)
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (2048, 128)
    assert config.prefix_cache_retention_interval == 0
    assert config.resolved_mamba_cache_mode == "align"
    assert parse_config({"enable_prefix_caching": False}).resolved_mamba_cache_mode == "none"
    assert parse_config({"prefix_cache_retention_interval": None}).prefix_cache_retention_interval is None
    assert parse_config({"async_scheduling": True, "max_num_batched_tokens": 8}).max_in_flight_tokens == 16


def test_specs_take_the_block_size_of_the_config() -> None:
    scenario = parse_scenario(
        {
            "mode": "replay",
            "config": {"block_size": 32},
            "groups": [
                {"spec": FULL},
                {"spec": {**FULL, "kind": "sliding_window", "sliding_window": 64, "block_size": 8}},
                {
                    "spec": {"kind": "mamba", "shapes": [[2, 3]], "dtypes": ["float32"]},
                    "is_eagle_group": True,
                },
            ],
            "num_blocks": 5,
            "ops": [],
        }
    )
    full, window, state = (entry.spec for entry in scenario.groups)
    assert isinstance(full, FullAttentionSpec)
    assert full.block_size == 32
    assert isinstance(window, SlidingWindowSpec)
    assert (window.block_size, window.sliding_window) == (8, 64)
    assert isinstance(state, MambaSpec)
    assert (state.shapes, state.mamba_cache_mode) == (((2, 3),), "align")
    assert [entry.is_eagle_group for entry in scenario.groups] == [False, False, True]


def test_layers_are_named_by_count_and_patterns_numbered_through() -> None:
    scenario = parse_scenario(
        {
            "mode": "plan",
            "layers": [{"name": "x", **FULL, "count": 2}, {"name": "y", **FULL}],
            "patterns": [{"repeat": 2, "layers": [{**FULL, "count": 2}, FULL]}],
            "available_memory": 1,
        }
    )
    names = [layer.name for layer in scenario.layers]
    assert names == ["x.0", "x.1", "y", *(f"layer.{i}" for i in range(6))]


@pytest.mark.parametrize(
    ("base", "path", "value", "named"),
    [
        (REPLAY, ["extra"], 1, "'extra'"),
        (REPLAY, ["config", "blocksize"], 1, "'blocksize'"),
        (REPLAY, ["groups", 0, "kind"], 1, "'kind'"),
        (REPLAY, ["groups", 0, "spec", "sliding_window"], 8, "'sliding_window'"),
        (REPLAY, ["groups", 0, "spec", "kind"], "fancy", "fancy"),
        (REPLAY, ["groups", 0, "spec", "head_size"], 0, "head_size"),
        (REPLAY, ["groups", 0, "spec", "dtype"], "float7", "float7"),
        (REPLAY, ["groups"], [], "at least one group"),
        (REPLAY, ["groups"], 3, "groups"),
        (REPLAY, ["num_blocks"], 1, "num_blocks"),
        (REPLAY, ["num_blocks"], True, "num_blocks"),
        (REPLAY, ["config", "max_model_len"], "8k", "8k"),
        (REPLAY, ["config", "policy"], "best", "best"),
        (REPLAY, ["config", "mamba_cache_mode"], "all", "all"),
        (REPLAY, ["config", "watermark"], -0.5, "-0.5"),
        (REPLAY, ["config", "use_eagle"], 1, "use_eagle"),
        (REPLAY, ["schedule"], {"requests": []}, "either 'ops' or 'schedule'"),
        (REPLAY, ["ops", 1, "id"], "b", "'b'"),
        (REPLAY, ["ops", 1, "id"], "", "'id' must not be empty"),
        (REPLAY, ["ops", 1, "op"], "fly", "fly"),
        (REPLAY, ["ops", 1, "chunk"], 0, "chunk"),
        (REPLAY, ["ops", 1, "n"], 2, "'n'"),
        (REPLAY, ["ops", 1], {"op": "new", "id": "a", "tokens": [1]}, "exists already"),
        (REPLAY, ["ops", 1], {"op": "decode", "id": "a", "n": 3, "tokens": [1]}, "n is 3"),
        (REPLAY, ["ops", 1, "expect"], 5, "expect"),
        (REPLAY, ["mode"], "dream", "dream"),
        (PLAN, ["layers"], [], "at least one layer"),
        (PLAN, ["layers"], [{"name": "a", **FULL}] * 2, "a"),
        (PLAN, ["layers", 0, "count"], 0, "count"),
        (PLAN, ["layers", 0, "count"], 10**12, "1000000000000 layers are more than 10000"),
        (PLAN, ["patterns"], [{"repeat": 5001, "layers": [FULL, FULL]}], "10003 layers are more than 10000"),
        (PLAN, ["patterns"], [{"layers": [{**FULL, "count": 10**12}]}], "are more than 10000"),
        (PLAN, ["num_blocks"], 4, "'num_blocks'"),
        (PLAN, ["available_memory"], -1, "available_memory"),
    ],
)
def test_bad_files_are_refused_by_name(base: dict[str, Any], path: list[Any], value: Any, named: str) -> None:
    with pytest.raises(JaxkvError) as caught:
        parse_scenario(changed(base, path, value))
    assert named in str(caught.value)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(JaxkvError, match="'num_blocks'"):
        parse_scenario({key: value for key, value in REPLAY.items() if key != "num_blocks"})


def test_a_request_cannot_be_used_after_it_was_freed() -> None:
    ops = [*REPLAY["ops"], {"op": "free", "id": "a"}, {"op": "lookup", "id": "a"}]
    with pytest.raises(JaxkvError, match=r"ops\[3\]"):
        parse_scenario({**REPLAY, "ops": ops})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "line 1"),
        ('{"mode": "plan", "mode": "plan"}', "twice"),
        ("[]", "object"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_broken_file_is_refused_with_its_name(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "case.json"
    path.write_text(text)
    with pytest.raises(JaxkvError, match=named) as caught:
        load_scenario(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(JaxkvError, match=r"none\.json"):
        load_scenario(tmp_path / "none.json")


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps(REPLAY))
    assert load_scenario(path).num_blocks == 10
