"""The TPU kernels run by the interpreter, which simulates DMAs and finds races and reads out of bounds."""

from functools import partial

import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.recurrent import operations
from pallas_kernels.recurrent.choice import Implementation
from tests.pallas_kernels.recurrent.cases import (
    Sequence,
    check,
    convolution,
    delta,
    make_step,
    mamba1,
    mamba2,
)

INTERPRET = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")
REGISTRIES = ("CAUSAL_CONV1D", "SELECTIVE_SCAN", "SSD", "GATED_DELTA_RULE")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The kernels under the interpreter, through the public operations."""
    for name in REGISTRIES:
        known = getattr(operations, name)
        run, refuses = known["pallas_tpu"]
        changed = known | {"pallas_tpu": Implementation(partial(run, interpret=INTERPRET), refuses)}
        monkeypatch.setattr(operations, name, changed)


OPERATIONS = {
    "conv": (convolution(256), {"page_rows": 8}),
    "mamba1": (mamba1(1024, 4), {"page_rows": 16}),
    "mamba2": (mamba2(4, 64, 16), {"page_rows": 8}),
    "delta": (delta(1, 2, 16, 128), {"page_rows": 8}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_mixed_step_with_checkpoints(name, dtype):
    operation, sizes = OPERATIONS[name]
    sequences = [
        Sequence(before=0, new=1, starts_from_zeros=True, checkpoints=(1,)),
        Sequence(before=9, new=1, in_place=False),
        Sequence(before=7, new=0, in_place=False),
        Sequence(before=3, new=70, checkpoints=(5, 67)),
    ]
    step = make_step(operation, sequences, dtype=dtype, spare_tokens=2, spare_rows=1, **sizes)
    check(step, "pallas_tpu")
