"""The scripts around the laboratory run on small traces, and refuse what makes no sense."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOONCAKE = str(ROOT / "tests" / "lab" / "data" / "mooncake_head.jsonl")
CONFIGS = ROOT / "tests" / "model_config" / "data" / "configs"


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_bench_replay_measures_and_says_what_it_needs() -> None:
    trace = ["--trace", MOONCAKE, "--model", str(CONFIGS / "gemma-3-27b.json")]
    done = script("bench_replay.py", *trace, "--fits", "1", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert figures["requests"] == 6
    assert figures["jaxkv_requests_per_minute"] > 0
    # The first 512-token block is common to all: five of six requests hit its 32 blocks of 16 tokens.
    tokens = sum(json.loads(line)["input_length"] for line in Path(MOONCAKE).read_text().splitlines())
    assert figures["jaxkv_token_hit_rate"] == 5 * 512 / tokens
    refused = script("bench_replay.py", *trace, "--check")
    assert (refused.returncode, refused.stderr) == (2, "bench_replay: --check needs --vllm FOLDER\n")


def test_hit_rates_makes_a_row_for_each_model_and_memory(tmp_path: Path) -> None:
    words = ["--models", str(CONFIGS), "--mooncake", MOONCAKE, "--only", "gpt-oss-120b", "--jobs", "1"]
    done = script("hit_rates.py", *words, "--json", str(tmp_path / "reports.json"))
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| gpt-oss-120b")]
    assert [row.split(" | ")[1] for row in rows] == ["1", "4", "16", "64"]
    assert len(json.loads((tmp_path / "reports.json").read_text())) == 8
    assert script("hit_rates.py", "--models", "x", "--policies", "y").returncode == 2
