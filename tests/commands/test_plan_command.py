import json

import pytest

from jaxkv.cli import main


def test_json_of_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gemma3-270m", "--memory", "64MiB", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes_per_block"] == 3 * 16384
    assert report["num_blocks"] == 64 * 2**20 // (3 * 16384)
    assert report["dtype"] == "bfloat16"
    assert [len(group["layer_names"]) for group in report["groups"]] == [3] * 6
    assert report["max_model_len"] < 32768  # lowered to fit
    assert sum(report["blocks_per_request"]) <= report["usable_blocks"]


def test_the_table_of_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--memory", "256MiB", "--max-model-len", "4096", "--policy", "split", "--dtype", "float32"]
    assert main(["plan", "--model", "gemma3-270m", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith("gemma3-270m: 18 layers, float32, policy split")
    assert "3 layer slots x 32 KiB = 96 KiB" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "much"], "'much' is not a memory size"),
        (["--memory", "10KiB"], "holds no usable block"),
        (["--memory", "1MiB", "--max-model-len", "8192"], "lower max_model_len to"),
        (["--block-size", "0"], "block_size must be an integer of at least 1, not 0"),
        (["--block-size", "-16"], "not -16"),
        (["--max-model-len", "0"], "max_model_len must be a whole number of at least 1, got 0"),
        (["--max-num-batched-tokens", "0"], "max_num_batched_tokens"),
        (["--dtype", "bf8"], "unknown dtype 'bf8'"),
        (["--policy", "best"], "unknown policy 'best'"),
        (["--page-alignment", "0"], "page_alignment_bytes"),
    ],
)
def test_bad_input_exits_with_two_and_prints_nothing_else(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["plan", "--model", "gemma3-270m", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxkv: error: ")
    assert message in captured.err
