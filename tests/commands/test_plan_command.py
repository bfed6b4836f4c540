import json
from pathlib import Path

import pytest

from jaxkv.cli import main
from tests.model_config.published import CONFIGS


def config(name: str) -> str:
    return str(CONFIGS / f"{name}.json")


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str):
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_of_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, "gemma3-270m", "--memory", "64MiB")
    assert report["bytes_per_block"] == 3 * 16384
    assert report["num_blocks"] == 64 * 2**20 // (3 * 16384)
    assert report["dtype"] == "bfloat16"
    assert [len(group["layer_names"]) for group in report["groups"]] == [3] * 6
    assert report["max_model_len"] < 32768  # lowered to fit
    assert sum(report["blocks_per_request"]) <= report["usable_blocks"]
    assert report["policy"] == "split"


def test_the_table_of_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--memory", "256MiB", "--max-model-len", "4096", "--policy", "split", "--dtype", "float32"]
    assert main(["plan", "--model", "gemma3-270m", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith("gemma3-270m: float32 cache, policy split")
    assert "3 layer slots x 32 KiB = 96 KiB" in out


def test_a_machine_leaves_what_weights_and_activations_do_not_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--accelerator", "tpu-v6e", "--chips", "8", "--tensor-parallel", "4"]
    report = report_of(capsys, config("qwen3.5-27b"), *arguments)
    budget, machine = report["machine"]["budget"], report["machine"]
    assert machine["data_parallel"] == 2
    assert budget["weight_bytes"] == report["parameters"] * 2 // 4
    assert machine["cache_bytes_per_chip"] == budget["chip_bytes"] - sum(
        budget[part] for part in ("runtime_bytes", "weight_bytes", "activation_bytes")
    )
    assert (
        report["pool_bytes"]
        <= machine["cache_bytes_per_chip"]
        < report["pool_bytes"] + report["bytes_per_block"]
    )
    smaller = report_of(capsys, config("qwen3.5-27b"), *arguments, "--weight-dtype", "fp8")
    assert smaller["machine"]["budget"]["weight_bytes"] == report["parameters"] // 4


def test_cache_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = {
        dtype: report_of(capsys, config("command-r7b"), "--cache-dtype", dtype)["bytes_per_token"]
        for dtype in ("bf16", "fp8", "int8")
    }
    scales = 32 * 8 * 8
    assert tokens == {"bf16": 131072, "fp8": 65536 + scales, "int8": 65536 + scales}


def test_the_dtype_of_keys_and_values_may_differ_from_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, config("jamba-1.5-mini"), "--dtype", "bf16", "--kv-cache-dtype", "fp8")
    assert (report["dtype"], report["cache_dtype"]) == ("bfloat16", "float8_e4m3fn")
    assert report["bytes_per_token"] == 4 * 8 * (2 * 128 + 8)  # four attention layers of eight KV heads
    assert main(["plan", config("jamba-1.5-mini"), "--kv-cache-dtype", "fp4"]) == 2
    assert "kv_cache_dtype must be one of auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "growing", "windows"),
    [
        ("gemma-3-27b", 81920, 436207616),
        ("llama-4-scout", 49152, 1207959552),
        ("mistral-7b-v0.1", 0, 536870912),
        ("kimi-k3", 27648, 0),
    ],
)
def test_windows_do_not_grow(
    capsys: pytest.CaptureFixture[str], name: str, growing: int, windows: int
) -> None:
    report = report_of(capsys, config(name), "--memory", "64GiB")
    assert (report["growing_bytes_per_token"], report["window_bytes"]) == (growing, windows)
    assert main(["plan", config(name), "--memory", "64GiB"]) == 0
    text = capsys.readouterr().out
    assert f"{growing:,} B a token" in text
    assert ("in full windows" in text) == (windows > 0)


def test_longer_requests_than_the_model_was_made_for_are_warned_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    longer = report_of(capsys, config("gemma-3-270m"), "--max-model-len", "100000")
    assert longer["warnings"] == [
        "max_model_len 100,000 is more than the 32,768 tokens that the model was made for"
    ]
    assert report_of(capsys, config("gemma-3-270m"), "--max-model-len", "32768")["warnings"] == []


def test_replicated_heads_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, config("qwen3.5-35b-a3b"), "--tensor-parallel", "8")
    assert "2 KV heads on 8 chips: each is replicated on 4" in report["warnings"]


def test_layers_from_a_list(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    layers = [
        {"name": "full", "count": 2, "kind": "full", "num_kv_heads": 2, "head_size": 64},
        {"name": "m", "count": 3, "kind": "mamba", "shapes": [[4, 100]], "dtypes": ["float32"]},
    ]
    path.write_text(json.dumps({"layers": layers, "max_model_len": 4096}))
    report = report_of(capsys, "--layers", str(path))
    assert (report["model"], report["max_model_len"]) == ("mine", 4096)
    assert report["layers_by_kind"] == {"full": 2, "mamba": 3}
    path.write_text(json.dumps({"layers": [{"name": "a", "kind": "fool"}]}))
    assert main(["plan", "--layers", str(path)]) == 2
    assert "mine.json" in capsys.readouterr().err


def test_several_models_in_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    models = [config("gemma-3-27b"), config("kimi-k3"), config("lfm3-1.7b")]
    assert main(["plan", "--compare", *models, "--memory", "64GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["model", "gemma-3-27b", "kimi-k3", "lfm3-1.7b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "much"], "'much' is not a memory size"),
        (["--memory=-1GiB"], "'-1GiB' is not a memory size"),
        (["--memory", "10KiB"], "holds no usable block"),
        (["--memory", "1MiB", "--max-model-len", "8192"], "lower max_model_len to"),
        (["--memory", "64MiB", "--max-model-len", "32768"], "MiB short; lower max_model_len to"),
        (["--block-size", "0"], "block_size must be an integer of at least 1, not 0"),
        (["--block-size", "-16"], "not -16"),
        (["--max-model-len", "0"], "max_model_len must be an integer of at least 1, not 0"),
        (["--max-num-batched-tokens", "0"], "max_num_batched_tokens"),
        (["--max-block-growth", "0"], "max_block_growth"),
        (["--dtype", "bf8"], "unknown dtype 'bf8'"),
        (["--dtype", "int16"], "unknown dtype 'int16' of keys and values; known are float32, bfloat16"),
        (["--policy", "best"], "unknown policy 'best'"),
        (["--page-alignment", "0"], "page_alignment_bytes"),
        (["--accelerator", "tpu-v9"], "unknown accelerator 'tpu-v9'; known are cpu"),
        (["--accelerator", "h100", "--chips", "3", "--tensor-parallel", "2"], "3 chips are not"),
        (["--tensor-parallel", "0"], "tensor_parallel must be at least 1, got 0"),
        (["--tensor-parallel", "3"], "tensor_parallel 3 does not divide 4 heads; choose one of 1, 2, 4"),
        (["--layers", "x.json"], "give either models or --layers FILE"),
        (["--memory", ""], "'' is not a memory size"),
        (["--weights=-1"], "'-1' is not a memory size"),
        (["--weight-dtype", "bf8"], "unknown dtype 'bf8'"),
        (["--state-dtype", "bf8"], "unknown dtype 'bf8'"),
        (
            ["--state-dtype", "int8"],
            "unknown dtype 'int8' of recurrent states; known are float32, bfloat16, float16",
        ),
        (
            ["--dtype", "int8", "--kv-cache-dtype", "fp8"],
            "dtype int8 and kv_cache_dtype fp8 both say what keys and values are in: give one",
        ),
        (["--html", ""], "cannot write --html"),
        (["--html", "/nowhere/page.html"], "cannot write --html /nowhere/page.html"),
    ],
)
def test_bad_input_exits_with_two(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["plan", "--model", "gemma3-270m", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxkv: error: ")
    assert message in captured.err


def test_memory_below_one_request_names_the_shortfall_in_gib(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--memory", "2GiB", "--max-model-len", "131072"]
    assert main(["plan", config("gemma-3-27b"), *arguments]) == 2
    err = capsys.readouterr().err
    assert "GiB short; lower max_model_len to" in err
    assert "raise the memory to" in err


def test_weights_that_the_config_does_not_size_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config("falcon-h1-7b"), "--accelerator", "h100"]) == 2
    assert "none of the keys vocab_size): give --weights SIZE or --memory SIZE" in capsys.readouterr().err
    assert main(["plan", config("falcon-h1-7b"), "--accelerator", "h100", "--weights", "15GiB"]) == 0


def test_weights_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config("command-a"), "--accelerator", "h100"]) == 2
    assert "GiB too many; raise --tensor-parallel" in capsys.readouterr().err
