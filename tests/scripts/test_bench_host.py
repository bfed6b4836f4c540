"""The host benchmark runs, counts what it says, and refuses what it does not know."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_host.py"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


def test_the_figures_of_the_chosen_cases_come_as_json() -> None:
    done = bench(
        "--json", "--cases", "lookup32k,chunk,decode1,step1,hash", "--layouts", "three", "--rounds", "1"
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["figure"] for row in rows] == [
        "look-up 32k",
        "admission 32k + 512",
        "chunk of 2,048",
        "free 32k",
        "decode step of 1, manager",
        "decode step of 1, scheduler",
        "hashing 32k",
    ]
    assert all(row["jaxkv_us"] > 0 and row["vllm_us"] is None and row["met"] is None for row in rows)


def test_the_table_compares_31_groups_with_7() -> None:
    done = bench("--cases", "decode1", "--layouts", "gemma3,gemma3_31", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert "decode step of 1, manager: 31 groups take" in done.stdout


def test_jaxkv_may_do_what_vllm_does() -> None:
    done = bench("--json", "--cases", "chunk", "--layouts", "mamba", "--eviction", "vllm", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["environment"]["eviction"] == "vllm"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cases", "decode3"), "unknown case 'decode3'; known: lookup32k"),
        (("--layouts", "gemma"), "unknown layout 'gemma'; known: full"),
        (("--eviction", "fifo"), "unknown eviction policy 'fifo'; known are reach, lru, flops, vllm"),
        (("--rounds", "0"), "--rounds must be at least 1, got 0"),
        (("--vllm", "/nowhere"), "--vllm /nowhere holds no vllm/v1/core/kv_cache_manager.py"),
    ],
)
def test_what_is_not_known_is_refused(arguments: tuple[str, ...], message: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
