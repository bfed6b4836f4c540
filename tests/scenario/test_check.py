"""`jaxkv scenario`: every recorded and worked-out case, and what the command does with good and bad files."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxkv.cli import main
from jaxkv.errors import JaxkvError
from jaxkv.scenario.answer_text import answer_text
from jaxkv.scenario.compare import compare_with_saved, has_expects
from jaxkv.scenario.run import check_file, run_scenario, saved_answer_path
from jaxkv.scenario.scenario import load_json, load_scenario, parse_scenario

DATA = Path(__file__).parent / "data"
FILES = sorted(path for path in DATA.glob("*/*.json") if not path.name.endswith(".answer.json"))
DIFFERENCES = Path(__file__).parents[2] / "docs" / "differences.md"

SMALL: dict[str, Any] = {
    "mode": "replay",
    "config": {"max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 16},
    "groups": [{"spec": {"kind": "full", "num_kv_heads": 2, "head_size": 64}}],
    "num_blocks": 11,
    "ops": [
        {"op": "new", "id": "a", "tokens": {"seed": 1, "len": 16}},
        {"op": "prefill", "id": "a", "chunk": 6},
        {"op": "new", "id": "b", "tokens": {"seed": 1, "len": 16}},
        {"op": "lookup", "id": "b", "expect": {"hit_tokens": 12}},
    ],
}


def write(path: Path, raw: Any) -> str:
    path.write_text(json.dumps(raw))
    return str(path)


def test_there_are_twelve_recorded_and_ten_worked_out_cases() -> None:
    assert len([path for path in FILES if path.parent.name == "vllm"]) == 12
    assert len([path for path in FILES if path.parent.name == "right"]) == 10


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_answer_is_the_recorded_or_the_right_one(path: Path) -> None:
    assert [str(difference) for difference in check_file(path)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_difference_from_a_recorded_answer_is_proven(path: Path) -> None:
    scenario = load_scenario(path)
    if saved_answer_path(path).exists() and has_expects(scenario):
        assert f"`{path.stem}`" in DIFFERENCES.read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_answer_is_json_that_reads_back(path: Path) -> None:
    answer = run_scenario(load_scenario(path))
    assert json.loads(answer_text(answer)) == answer


@pytest.mark.parametrize("name", ["full_mamba_plan", "three_kinds", "eagle", "tight_pool"])
def test_our_own_answer_can_be_saved_and_checked_later(name: str) -> None:
    scenario = load_scenario(DATA / "vllm" / f"{name}.json")
    answer = run_scenario(scenario)
    assert compare_with_saved(scenario, answer, json.loads(answer_text(answer))) == []


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("gemma3_plan", ["num_blocks"], 5),
        ("gemma3_plan", ["groups", 0, "layer_names"], ["layer.0"]),
        ("gemma3_plan", ["groups", 1, "spec", "block_size"], 8),
        ("gemma3_plan", ["groups", 1, "spec", "page_size_bytes"], 8),
        ("gemma3_plan", ["groups"], []),
        ("chunked_local", ["ops", 1, "steps", 1, "free_blocks"], 1),
        ("chunked_local", ["ops", 1, "steps", 1, "tokens"], [50, 99]),
        ("chunked_local", ["ops", 1, "steps", 2, "block_tables", 1, 3], 7),
        ("chunked_local", ["ops", 4, "hit_tokens"], 128),
        ("chunked_local", ["ops", 4, "hit_blocks", 1, 8], 0),
        ("chunked_local", ["ops", 10, "steps"], []),
        ("gemma3_dense", ["ops", 17, "hits"], 1),
        ("tight_pool", ["final_free_blocks"], 1),
    ],
)
def test_a_changed_saved_answer_is_noticed(name: str, path: list[Any], value: Any) -> None:
    scenario = load_scenario(DATA / "vllm" / f"{name}.json")
    saved = load_json(DATA / "vllm" / f"{name}.answer.json")
    place = saved
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert compare_with_saved(scenario, run_scenario(scenario), saved)


def test_a_refusal_is_an_answer() -> None:
    raw = {**SMALL, "config": {**SMALL["config"], "prefix_match_unit": 3}}
    answer = run_scenario(parse_scenario(raw))
    assert answer["error"]["type"] == "JaxkvError"
    assert "prefix_match_unit 3" in answer["error"]["message"]


def test_an_op_that_does_not_fit_says_so_and_changes_nothing() -> None:
    ops = [
        {"op": "new", "id": "big", "tokens": {"seed": 9, "len": 60}},
        {"op": "step", "id": "big", "num_tokens": 60},
        {"op": "new", "id": "long", "tokens": {"seed": 9, "len": 100}},
        {"op": "step", "id": "long", "num_tokens": 100},
        {"op": "pool"},
    ]
    answers = run_scenario(parse_scenario({**SMALL, "ops": ops}))["ops"]
    assert answers[1]["result"] == "no_space"
    assert answers[3]["result"] == "refused"
    assert "100" in answers[3]["error"]["message"]
    assert answers[4]["free_blocks"] == 10


def test_the_command_prints_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scenario", write(tmp_path / "case.json", SMALL)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ops"][3]["hit_tokens"] == 12
    assert [step["tokens"] for step in answer["ops"][1]["steps"]] == [[0, 6], [6, 12], [12, 16]]


def test_the_command_checks_files_and_passes_over_answers(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(path) for path in (DATA / "right").glob("window_*.json")]
    files += [str(path) for path in (DATA / "vllm").glob("three_kinds*.json")]
    assert main(["scenario", "--check", *files]) == 0
    assert capsys.readouterr().out == "5 scenarios checked, 0 differ\n"


def test_the_command_prints_every_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = json.loads(json.dumps(SMALL))
    wrong["ops"][3]["expect"] = {"hit_tokens": 8, "lost_tokens": 4, "limited_by": None}
    assert main(["scenario", "--check", write(tmp_path / "case.json", wrong)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2] for line in lines[:2]] == [
        "ops[3] lookup.hit_tokens: is 12, expected 8",
        "ops[3] lookup.lost_tokens: is 0, expected 4",
    ]
    assert lines[2:] == ["1 scenarios checked, 1 differ"]


@pytest.mark.parametrize("arguments", [["a.json", "b.json"], ["--check", "x.answer.json"], ["missing.json"]])
def test_the_command_refuses_what_it_cannot_use(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scenario", *arguments]) == 2
    assert capsys.readouterr().err.startswith("jaxkv: error: ")


def test_a_file_with_nothing_to_compare_with_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {**SMALL, "ops": SMALL["ops"][:3]}
    assert main(["scenario", "--check", write(tmp_path / "case.json", plain)]) == 2
    assert "case.answer.json" in capsys.readouterr().err


def test_an_unknown_key_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scenario", write(tmp_path / "case.json", {**SMALL, "block_count": 3})]) == 2
    assert "'block_count'" in capsys.readouterr().err


def test_a_lookup_finds_what_the_chunks_before_it_computed() -> None:
    # Worked out by hand: a state lies where the chunk ended, at 28; a prompt of 16 is there but for its last
    # token, of which whole units of 2 make 14. Neither is of use to a chunk of the very same step.
    full, state = (
        {"spec": {"kind": "full", "num_kv_heads": 2, "head_size": 64}},
        {"spec": {"kind": "mamba", "shapes": [[10]], "dtypes": ["float32"]}},
    )
    same_step = {"op": "step", "id": "b", "num_tokens": 9, "new_step": False}

    def answers(groups: list[Any], length: int, **config: Any) -> list[Any]:
        ops = [
            {"op": "new", "id": "a", "tokens": {"seed": 1, "len": length}},
            {"op": "prefill", "id": "a", "upto": length - length % 4},
            {"op": "new", "id": "b", "tokens": {"seed": 1, "len": length}},
            {"op": "lookup", "id": "b"},
            same_step,
        ]
        replay = SMALL | {"config": {"block_size": 4} | config, "groups": groups, "num_blocks": 50}
        return run_scenario(parse_scenario(replay | {"ops": ops}))["ops"][3:]

    lookup, chunk = answers([full, state], 30)
    assert (lookup["hit_tokens"], chunk["result"]) == (28, "wait")
    lookup, _ = answers([full], 16, prefix_match_unit=2)
    assert lookup["hit_tokens"] == 14


def test_a_replay_without_ops_answers_with_none() -> None:
    assert run_scenario(parse_scenario(SMALL | {"ops": []}))["ops"] == []


@pytest.mark.parametrize(
    ("expect", "differs"),
    [
        ({"max_hit_tokens": 12}, False),
        ({"max_hit_tokens": 11}, True),
        ({"max_limited_by": 1}, True),
        ({"hit_tokens": 1.2e1}, False),
        ({"hit_tokens": 1e-5}, True),
        ({"lost_tokens": 1e-5}, True),
    ],
)
def test_bounds_and_decimals_of_an_expectation(expect: Any, differs: bool, tmp_path: Path) -> None:
    raw = SMALL | {"ops": [*SMALL["ops"][:3], {"op": "lookup", "id": "b", "expect": expect}]}
    assert bool(check_file(Path(write(tmp_path / "case.json", raw)))) == differs


def test_a_request_that_would_arrive_after_too_many_steps_is_refused() -> None:
    late = {"id": "a", "tokens": [1], "arrival_step": 10**9}
    raw = {key: value for key, value in SMALL.items() if key != "ops"} | {"schedule": {"requests": [late]}}
    with pytest.raises(JaxkvError, match=r"requests\[0\]: 'arrival_step' is 1000000000; .* at most 65536"):
        parse_scenario(raw)
