"""Which shapes and GPUs the GPU kernels serve, and what happens to the others."""

import logging
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels.operations import IMPLEMENTATIONS, choose_implementation
from pallas_kernels.settings import AttentionSettings
from tests.pallas_kernels.cases import make_step

SERVED = {"seq_lens": [3], "query_lens": [1], "head_size": 128, "block_size": 16}


def settings_and_table(**change):
    step = make_step(**(SERVED | change))
    return AttentionSettings(layout=step.layout, layer_slot=0, layer_slots=1), step.table


@pytest.fixture
def on_gpu(monkeypatch):
    """Pretends that this process has a GPU of a compute capability."""

    def pretend(capability: str) -> None:
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        device = SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        monkeypatch.setattr("pallas_kernels.choice._already_said", set())

    return pretend


@pytest.mark.parametrize("capability", ["9.0", "10.0"])
def test_a_gpu_takes_pallas_where_it_serves(on_gpu, capability):
    on_gpu(capability)
    assert choose_implementation(*settings_and_table()) is IMPLEMENTATIONS["pallas_gpu"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_size": 80}, "head_size 80 is not a multiple of 32 up to 256"),
        ({"head_size": 320}, "head_size 320 is not a multiple of 32 up to 256"),
        ({"block_size": 4}, "block_size 4 is not a multiple of 8"),
        ({"dtype": "int8"}, "pages of int8 are not among bfloat16, float32"),
        ({"dtype": "float8_e4m3fn"}, "pages of float8_e4m3fn are not among bfloat16, float32"),
        ({"head_size": 96, "dtype": "bfloat16"}, "a page of 2048 words is not a whole number of heads of 96"),
    ],
)
def test_a_shape_that_is_not_served(on_gpu, caplog, change, reason):
    on_gpu("9.0")
    arguments = settings_and_table(**change)
    with pytest.raises(ValueError, match=reason):
        choose_implementation(*arguments, "pallas_gpu")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert choose_implementation(*arguments) is IMPLEMENTATIONS["xla"]
    assert len(caplog.messages) == 1
    assert reason in caplog.messages[0]


def test_a_group_of_too_many_query_heads(on_gpu, caplog):
    """128 float32 queries of 256 are 128 KiB, and as terms beside the means' more than a block has."""
    on_gpu("9.0")
    settings, table = settings_and_table(head_size=256)
    served, refused = (jax.ShapeDtypeStruct((4, heads, 256), "float32") for heads in (8, 128))
    assert choose_implementation(settings, table, q=served) is IMPLEMENTATIONS["pallas_gpu"]
    reason = "128 query heads of a KV head of 256 need more than 232448 bytes of shared memory"
    with pytest.raises(ValueError, match=reason):
        choose_implementation(settings, table, "pallas_gpu", refused)
    with caplog.at_level(logging.WARNING):
        assert choose_implementation(settings, table, q=refused) is IMPLEMENTATIONS["xla"]
    assert reason in caplog.messages[0]


@pytest.mark.parametrize(("said", "capability"), [("8.0", 8.0), ("12.0", 12.0), ("gfx942", 0.0)])
def test_a_gpu_that_is_neither_hopper_nor_blackwell_takes_xla(on_gpu, caplog, said, capability):
    """Ampere has no TMA, consumers' Blackwell less shared memory, and one GPU is not NVIDIA's."""
    on_gpu(said)
    with caplog.at_level(logging.WARNING):
        assert choose_implementation(*settings_and_table()) is IMPLEMENTATIONS["xla"]
    assert f"compute capability {capability} is none of 9, 10" in caplog.messages[0]
