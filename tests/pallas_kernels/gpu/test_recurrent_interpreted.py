"""The GPU kernel of recurrent decodes, run by the interpreter through the public operations."""

from functools import partial
from types import SimpleNamespace

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.recurrent import StateLayout, operations
from pallas_kernels.recurrent.choice import Implementation, choose
from pallas_kernels.recurrent.state_place import StatePlace
from tests.pallas_kernels.recurrent.recurrences import delta, mamba1, mamba2
from tests.pallas_kernels.recurrent.steps import Sequence, check, make_step

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    for name in ("SELECTIVE_SCAN", "SSD", "GATED_DELTA_RULE"):
        known = getattr(operations, name)
        run, refuses = known["pallas_gpu"]
        changed = known | {"pallas_gpu": Implementation(partial(run, interpret=INTERPRET), refuses)}
        monkeypatch.setattr(operations, name, changed)


@pytest.mark.parametrize(
    "operation",
    [mamba1(256, 4), mamba2(4, 64, 8, 2), delta(1, 2, 8, 128)],
    ids=["mamba1", "mamba2", "delta"],
)
def test_decodes_equal_the_definition(operation):
    """From zeros, in place, to another block, and a row of padding; states that cross pages."""
    sequences = [
        Sequence(before=0, new=1, starts_from_zeros=True),
        Sequence(before=4, new=1),
        Sequence(before=9, new=1, in_place=False),
    ]
    step = make_step(operation, sequences, page_rows=8, spare_rows=1, decode_only=True)
    check(step, "pallas_gpu")


@pytest.mark.parametrize(
    ("operation", "rest", "reason"),
    [
        (mamba1(192, 4), {}, "192 channels of a block are not a multiple of 128"),
        (mamba1(256, 4), {"dtype": "bfloat16"}, "states of bfloat16 are not float32"),
        (mamba2(4, 64, 8, 4), {}, "4 key heads do not divide 2 lines"),
    ],
)
def test_a_state_that_is_not_served_is_refused_by_name(operation, rest, reason):
    step = make_step(operation, [Sequence(before=4, new=1)], page_rows=8, decode_only=True, **rest)
    with pytest.raises(ValueError, match=reason):
        check(step, "pallas_gpu")


def test_a_gpu_runs_the_kernels_and_convolutions_in_xla(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(compute_capability="9.0")])
    layout = StateLayout(shapes=((256, 4),), dtypes=("float32",), page_rows=8)
    place = StatePlace(layout=layout, part=0, layer_slot=0, layer_slots=1)
    scan = operations.SELECTIVE_SCAN
    assert choose(scan, place, None) is scan["pallas_gpu"].run
    assert choose(operations.CAUSAL_CONV1D, place, None) is operations.CAUSAL_CONV1D["xla"].run
