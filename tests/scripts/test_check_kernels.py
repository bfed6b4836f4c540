"""The script that compiles the kernels: the quick set compiles, and every shape can be made."""

import json

import pytest

from tests.scripts.running import run_script


def test_one_shape_of_each_kernel_compiles_for_a_chip_that_is_not_there():
    pytest.importorskip("libtpu")
    done = run_script("check_kernels.py", "--chip", "v6e", "--quick", "--json")
    assert done.returncode == 0, done.stdout
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {row["kernel"] for row in rows}
    assert {
        "attention",
        "write",
        "selective_scan",
        "ssd",
        "gated_delta_rule",
        "causal_conv1d",
        "conv_delta_rule",
    } <= kernels
    for row in rows:
        assert row["temp MB"] < 64, row  # nothing copies the pool of 1 GiB
        assert row["VMEM MB"] < 128, row  # v6e's, in MiB
        assert 0 < row["SMEM kB"] < 1000, row  # 1 MiB: filled to the brim, scalars are spilled to HBM


def test_an_unknown_shape_is_refused():
    done = run_script("check_kernels.py", "--only", "no such shape")
    assert done.returncode == 2
    assert "no shape has 'no such shape'" in done.stderr
