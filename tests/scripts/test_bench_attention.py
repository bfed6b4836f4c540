"""The benchmark of decode attention: a case runs, at a short context, and is measured against the memory."""

import json

import pytest

from tests.scripts.running import run_script


def test_a_case_is_timed_against_its_bytes():
    options = ("--json", "--rounds", "1", "--context", "64", "--only", "27b/4 float32, block 16, batch 8")
    done = run_script("bench_attention.py", *options)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    *_, xla = measured["rows"]
    assert xla["implementation"] == "xla"
    # 8 sequences of 64 tokens, K and V of 4 heads of 128 in float32.
    moved = 8 * 64 * 2 * 4 * 128 * 4
    for row in measured["rows"]:
        assert row["bound_ms"] == pytest.approx(1e3 * moved / (1e9 * row["copy_gb_s"]))
        assert row["ratio"] == pytest.approx(row["ms"] / row["bound_ms"])


def test_a_case_that_does_not_exist_is_refused():
    done = run_script("bench_attention.py", "--only", "float64")
    assert done.returncode == 2
    assert "no case has 'float64' in its name" in done.stderr
