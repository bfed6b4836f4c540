"""`jaxkv replay`: what is read, printed, checked and refused."""

import json
from pathlib import Path

import pytest

from jaxkv.cli import main
from jaxkv.lab import replay as lab_replay

TRACES = Path(__file__).parents[1] / "lab" / "data"
MODEL = str(Path(__file__).parents[1] / "model_config" / "data" / "configs" / "gemma-3-1b.json")
MOONCAKE = ["--trace", str(TRACES / "mooncake_head.jsonl"), "--model", MODEL]
MADE_UP = ["--generate", "chat", "--requests", "12", "--model", MODEL, "--max-model-len", "8192"]


def run(*words: str) -> int:
    return main(["replay", *words])


def test_a_report_is_printed_written_and_found_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    assert run(*MOONCAKE, "--fits", "0.5", "--max-model-len", "32768", "--json", str(path)) == 0
    printed = capsys.readouterr().out
    report = json.loads(path.read_text())
    assert f"token hit rate {report['token_hit_rate']:.4f}" in printed
    assert report["settings"]["clock"] == "sequential"
    assert report["trace"]["block_size"] == report["plan"]["hash_block_size"] == 512
    assert run("--verify", str(path)) == 0
    assert "same digest" in capsys.readouterr().out
    del report["asked"]["kv_cache_dtype"]  # as in reports made before there was such an option
    path.write_text(json.dumps(report))
    assert run("--verify", str(path)) == 0
    report["digest"] = "0" * 64
    path.write_text(json.dumps(report))
    assert run("--verify", str(path)) == 1
    assert "the report has 0000" in capsys.readouterr().out


def test_finer_blocks_are_said_to_give_a_lower_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*MOONCAKE, "--infinite", "--block-size", "16", "--json", "-") == 0
    report = json.loads(capsys.readouterr().out)
    assert any("lower bound" in note for note in report["trace"]["notes"])
    assert not any(loss["cause"] == "evicted" for loss in report["tokens"]["lost"])


def test_a_sweep_replays_every_combination(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.json"
    words = ["--sweep", "memory=256MiB:1KiB,retention=sparse:dense", "--jobs", "2", "--json", str(path)]
    assert run(*MADE_UP, *words) == 0
    reports = json.loads(path.read_text())["sweep"]
    assert [report["asked"]["sweep"] for report in reports] == [
        "memory 256MiB, retention sparse",
        "memory 256MiB, retention dense",
        "memory 1KiB, retention sparse",
        "memory 1KiB, retention dense",
    ]
    assert [report.get("error") is None for report in reports] == [True, True, False, False]
    assert reports[0]["settings"]["retention_interval"] == 0
    assert reports[1]["settings"]["retention_interval"] is None
    assert "memory 1KiB, retention sparse: " in capsys.readouterr().out


def test_a_sweep_goes_on_where_weights_do_not_fit_a_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.json"
    words = ["--weights", "40GiB", "--jobs", "1", "--json", str(path), "--sweep"]
    assert run(*MADE_UP, *words, "accelerator=tpu-v5e:tpu-v5p:tpu-v6e") == 0
    reports = json.loads(path.read_text())["sweep"]
    assert [report["asked"]["sweep"] for report in reports] == [
        f"accelerator {chip}" for chip in ("tpu-v5e", "tpu-v5p", "tpu-v6e")
    ]
    assert ["no memory is left" in report.get("error", "") for report in reports] == [True, False, True]
    assert "accelerator tpu-v6e: no memory is left" in capsys.readouterr().out
    assert run(*MADE_UP, *words, "accelerator=tpu-v5e:tpu-v6e") == 2


def test_files_that_cannot_be_written_are_refused_before_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def replays(*args: object) -> object:
        raise AssertionError("a replay began")

    monkeypatch.setattr("jaxkv.commands.replay._run", replays)
    monkeypatch.setattr("jaxkv.commands.replay._drawer", replays)
    missing = tmp_path / "missing" / "file"
    for option in ("--json", "--html"):
        assert run(*MOONCAKE, "--infinite", option, str(tmp_path)) == 2
        assert f"cannot write {option} {tmp_path}: it is a folder" in capsys.readouterr().err
        assert run(*MOONCAKE, "--infinite", option, str(missing)) == 2
        assert f"there is no folder {missing.parent}" in capsys.readouterr().err


def test_an_interrupt_prints_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update = lab_replay.Scheduler.update_from_output
    calls = 0

    def interrupted(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls > 10:
            raise KeyboardInterrupt
        return update(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(lab_replay.Scheduler, "update_from_output", interrupted)
    assert run(*MADE_UP, "--memory", "256MiB") == 130
    assert "PARTIAL: interrupted after" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--model", MODEL], "give either --trace FILE or --generate PATTERN"),
        ([*MADE_UP, "--trace", "x"], "give either --trace FILE or --generate PATTERN"),
        (["--generate", "chat"], "give either --model MODEL or --layers FILE"),
        ([*MADE_UP, "--blocks", "5", "--infinite"], "give one of --blocks, --infinite"),
        ([*MADE_UP, "--retention", "some"], "--retention must be sparse, dense or a number of tokens"),
        ([*MADE_UP, "--retention", "17"], "the retention interval 17 is not a multiple of"),
        ([*MADE_UP, "--fits", "0"], "--fits must be more than 0 and finite, got 0.0"),
        ([*MADE_UP, "--fits", "inf"], "--fits must be more than 0 and finite, got inf"),
        ([*MADE_UP, "--seed", "-1"], "--seed must be at least 0, got -1"),
        ([*MADE_UP, "--eviction", "oldest"], "unknown eviction policy 'oldest'; known are reach"),
        ([*MADE_UP, "--sweep", "fits=1,eviction=reach:oldest"], "unknown eviction policy 'oldest'"),
        ([*MADE_UP, "--sweep", "fits=1:2,fits=3"], "--sweep names fits twice"),
        ([*MADE_UP, "--sweep", "seed=1:2"], "--sweep 'seed=1:2' is not NAME=VALUE:VALUE"),
        ([*MADE_UP, "--sweep", "blocks=x"], "--sweep blocks=x: 'x' is not a number"),
        ([*MADE_UP, "--requests", "0"], "--requests must be at least 1, got 0"),
        (
            [*MADE_UP, "--engine", "--fits", "1", "--eviction", "lru"],
            "--engine does not take --fits, --eviction",
        ),
        (["--verify", "/nonexistent"], "cannot read the report /nonexistent"),
        (["--trace", "/nonexistent", "--model", MODEL], "cannot read the trace /nonexistent"),
    ],
)
def test_bad_input_is_refused_by_name(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    assert why in capsys.readouterr().err


def test_a_sweep_of_which_nothing_is_possible_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*MADE_UP, "--sweep", "memory=1KiB", "--jobs", "1") == 2
    assert "memory 1KiB: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ({"digest": "0", "token_hit_rate": 0.5}, "holds no complete report"),
        ({"digest": "0", "token_hit_rate": 0.5, "asked": [1]}, "holds no complete report"),
        ({"digest": "0", "asked": {}}, "holds no complete report"),
        ({"sweep": 3}, "holds no complete report"),
        (
            {"digest": "0", "token_hit_rate": 0.5, "asked": {"fits": "some"}},
            "options that make no sense: argument --fits: invalid float value: 'some'",
        ),
        (
            {"digest": "0", "token_hit_rate": 0.5, "asked": {"trace": 3, "of_tomorrow": 4}},
            "options that are unknown here: --of-tomorrow=4",
        ),
    ],
)
def test_what_is_no_report_is_refused(
    report: dict[str, object], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    assert run("--verify", str(path)) == 2
    assert why in capsys.readouterr().err
