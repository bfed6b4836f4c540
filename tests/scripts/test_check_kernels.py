"""The script that compiles the kernels: the quick set compiles, and every shape can be made."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_kernels.py"


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def test_one_shape_of_each_kernel_compiles_for_a_chip_that_is_not_there():
    pytest.importorskip("libtpu")
    done = check("--chip", "v6e", "--quick", "--json")
    assert done.returncode == 0, done.stdout
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {row["kernel"] for row in rows}
    assert {"attention", "write", "selective_scan", "ssd", "gated_delta_rule", "causal_conv1d"} <= kernels
    for row in rows:
        assert row["temp MB"] < 64, row  # nothing copies the pool of 1 GiB


def test_an_unknown_shape_is_refused():
    done = check("--only", "no such shape")
    assert done.returncode == 2
    assert "no shape has 'no such shape'" in done.stderr
