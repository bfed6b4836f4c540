"""The script for accelerators: refuses a machine without one; its measuring runs on a CPU at small sizes."""

import json

from tests.scripts.running import run_script


def test_a_machine_without_an_accelerator_is_said_to_be_one():
    done = run_script("check_device.py")
    assert done.returncode == 2
    assert "no accelerator here: JAX sees cpu" in done.stderr
    assert not done.stdout


def test_operations_are_compared_and_timed():
    done = run_script("check_device.py", "--platform", "cpu", "--quick", "--json", "--only", "27b/4 write")
    assert done.returncode == 0, done.stderr
    limits, *rows = map(json.loads, done.stdout.splitlines())
    assert limits["bandwidth"] > 0
    assert limits["rate"] > 0
    assert [row["shape"] for row in rows] == [
        "gemma3-27b/4 write decode",
        "gemma3-27b/4 write prefill",
        "gemma3-27b/4 write decode fp8",
        "gemma3-27b/4 write prefill int8",
    ]
    assert [row["implementation"] for row in rows] == ["numba", "numba", "xla", "xla"]
    for row in rows:
        assert row["error"] == 0
        assert row["us"] > 0
        assert row["share"] > 0


def test_what_there_is_no_time_for_is_named():
    done = run_script(
        "check_device.py", "--platform", "cpu", "--quick", "--only", "v2/4 write", "--limit-minutes", "0"
    )
    assert done.returncode == 3
    assert "NOT RUN, 0 minutes are over: 1 of 1: write mimo-v2/4 write decode" in done.stderr
