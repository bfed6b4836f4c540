"""Which shapes and GPUs the GPU kernels serve, and what happens to the others."""

import logging
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels.operations import IMPLEMENTATIONS, choose_implementation
from pallas_kernels.settings import AttentionSettings
from tests.pallas_kernels.cases import make_step

SERVED = {"seq_lens": [3], "query_lens": [1], "head_size": 128, "block_size": 16, "dtype": "bfloat16"}


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
        ({"head_size": 72}, "head_size 72 is not a multiple of 16 up to 256"),
        ({"head_size": 320}, "head_size 320 is not a multiple of 16 up to 256"),
        ({"head_size_v": 272}, "head_size_v 272 is not a multiple of 16 up to 256"),
        (
            {"head_size": 80, "head_size_v": 64},
            "parts of K of 80 and V of 64 in bfloat16 are not multiples of 16",
        ),
        (
            {"latent": True, "head_size": 96, "head_size_v": 48},
            "head_size_v 48 of latents is not a multiple of 32",
        ),
        ({"block_size": 4}, "block_size 4 is not a multiple of 8"),
        ({"dtype": "int8", "block_size": 48}, "block_size 48 is not a multiple of 32"),
        ({"dtype": "int8", "head_size": 80}, "parts of K of 80 and V of 80 in int8 are not multiples of 16"),
        ({"head_size": 96}, "a page of 2048 words is not a whole number of tokens of 96"),
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


@pytest.mark.parametrize(
    "change",
    [
        {"head_size": 80, "block_size": 64},
        {"head_size": 96, "block_size": 32},
        {"head_size": 192, "head_size_v": 128, "block_size": 32},
        {"dtype": "int8", "block_size": 128},
        {"dtype": "float8_e4m3fn", "block_size": 32, "head_size": 64},
        {"latent": True, "head_size": 576, "head_size_v": 512, "block_size": 64},
        {"dtype": "float32", "head_size": 256},
    ],
)
@pytest.mark.parametrize("group", [1, 20, 128])
def test_a_shape_that_is_served(on_gpu, change, group):
    """Any number of query heads: several tiles share a KV head."""
    on_gpu("9.0")
    settings, table = settings_and_table(**change)
    q = jax.ShapeDtypeStruct((4, group, settings.layout.head_size), "bfloat16")
    assert choose_implementation(settings, table, q=q) is IMPLEMENTATIONS["pallas_gpu"]


def test_latents_of_float32_have_no_room(on_gpu, caplog):
    """32 tokens of three terms are 108 KiB, beside 72 KiB of words and 48 KiB of means and more queries."""
    on_gpu("9.0")
    layout = {"latent": True, "head_size": 576, "head_size_v": 512, "block_size": 16, "dtype": "float32"}
    settings, table = settings_and_table(**layout)
    q = jax.ShapeDtypeStruct((4, 16, 576), "float32")
    reason = "16 queries over K of 576 and V of 512 in float32 need more than 232448 bytes of shared memory"
    with pytest.raises(ValueError, match=reason):
        choose_implementation(settings, table, "pallas_gpu", q)
    with caplog.at_level(logging.WARNING):
        assert choose_implementation(settings, table, q=q) is IMPLEMENTATIONS["xla"]
    assert reason in caplog.messages[0]


@pytest.mark.parametrize(("said", "capability"), [("8.0", 8.0), ("12.0", 12.0), ("gfx942", 0.0)])
def test_a_gpu_that_is_neither_hopper_nor_blackwell_takes_xla(on_gpu, caplog, said, capability):
    """Ampere has no TMA, consumers' Blackwell less shared memory, and one GPU is not NVIDIA's."""
    on_gpu(said)
    with caplog.at_level(logging.WARNING):
        assert choose_implementation(*settings_and_table()) is IMPLEMENTATIONS["xla"]
    assert f"compute capability {capability} is none of 9, 10" in caplog.messages[0]
