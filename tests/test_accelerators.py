import pytest

from jaxkv.accelerators import ACCELERATORS, find_accelerator
from jaxkv.errors import JaxkvError


def test_every_number_has_a_source() -> None:
    assert set(ACCELERATORS) == {
        *("cpu", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x", "h100", "h200", "b200")
    }
    for accelerator in ACCELERATORS.values():
        for figure in (accelerator.memory, accelerator.fast_memory, accelerator.scalar_memory):
            assert figure is None or (figure.num_bytes > 0 and figure.source)


def test_only_the_host_has_no_memory_of_its_own() -> None:
    assert [a.name for a in ACCELERATORS.values() if a.memory is None] == ["cpu"]


def test_an_unknown_accelerator_names_the_known_ones() -> None:
    with pytest.raises(JaxkvError, match=r"unknown accelerator 'tpu-v9'; known are cpu, tpu-v4, .*b200"):
        find_accelerator("tpu-v9")
