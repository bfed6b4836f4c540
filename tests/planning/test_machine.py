import pytest

from jaxkv.accelerators import find_accelerator
from jaxkv.errors import JaxkvError
from jaxkv.planning import PlanConfig, make_plan
from jaxkv.planning.machine import (
    USABLE_SHARE,
    activation_reserve,
    device_warnings,
    make_machine,
    memory_budget,
)
from tests.planning.layers import full, layers

GIB = 2**30


def test_chips_are_tensor_times_data_parallel() -> None:
    assert make_machine("h100").chips == 1
    assert make_machine("h100", chips=8, tensor_parallel=2).data_parallel == 4
    assert make_machine("h100", tensor_parallel=4, data_parallel=3).chips == 12
    with pytest.raises(JaxkvError, match="6 chips are not tensor_parallel 4 x data_parallel 1"):
        make_machine("h100", chips=6, tensor_parallel=4)
    with pytest.raises(JaxkvError, match="8 chips are not tensor_parallel 2 x data_parallel 2"):
        make_machine("h100", chips=8, tensor_parallel=2, data_parallel=2)


@pytest.mark.parametrize("name", ["chips", "tensor_parallel", "data_parallel"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_below_one_are_refused(name: str, value: int) -> None:
    with pytest.raises(JaxkvError, match=f"{name} must be at least 1, got {value}"):
        make_machine("h100", **{name: value})


def test_the_parts_of_a_chips_memory_sum_to_it() -> None:
    machine = make_machine("tpu-v5e", tensor_parallel=4)
    budget = memory_budget(machine, weight_bytes=10 * GIB + 1, activation_bytes=GIB // 2)
    assert budget.weight_bytes == (10 * GIB + 1 + 3) // 4
    assert budget.runtime_bytes == 16 * GIB - int(16 * GIB * USABLE_SHARE)
    parts = budget.runtime_bytes + budget.weight_bytes + budget.activation_bytes + budget.cache_bytes
    assert parts == budget.chip_bytes == 16 * GIB


def test_weights_that_do_not_fit_name_the_shortfall_and_the_setting() -> None:
    with pytest.raises(
        JaxkvError, match=r"16\.00 GiB of weights .* 14\.72 GiB usable are 1\.78 GiB too many; raise"
    ):
        memory_budget(make_machine("tpu-v5e"), 16 * GIB, GIB // 2)
    with pytest.raises(JaxkvError, match="give --memory"):
        memory_budget(make_machine("cpu"), 1, 1)


def test_the_activation_reserve_by_hand() -> None:
    # 10 tokens x (8 x 64 + 4 x 256 / 2) + 3 sequences x 8 x 1000 / 2
    reserve = activation_reserve(
        hidden_size=64, widest=256, vocab_size=1000, num_tokens=10, num_seqs=3, tensor_parallel=2
    )
    assert reserve == 10 * (512 + 512) + 3 * 4000


def test_tables_and_pages_too_large_for_a_tpu_core_are_warned_of() -> None:
    mix = layers((1, "full", full()))
    config = PlanConfig(max_model_len=32768, max_num_seqs=256)
    plan = make_plan(mix, config, 2**30)
    (warning,) = device_warnings(plan, find_accelerator("tpu-v6e"))
    assert "256 rows x 2048 blocks (2 MiB)" in warning
    assert "--max-num-seqs" in warning
    assert device_warnings(plan, find_accelerator("h100")) == []
    large = make_plan(layers((1, "full", full(block_size=16384))), PlanConfig(max_model_len=32768), 2**30)
    (warning,) = device_warnings(large, find_accelerator("tpu-v4"))
    assert "VMEM: lower --block-size" in warning
