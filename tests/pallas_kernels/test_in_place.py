"""The donated pool is updated where it lies: memory analysis of compiled chains of layers."""

import jax
import pytest

from pallas_kernels.aot import compile_for_tpu
from tests.pallas_kernels.chain import gemma_27b_under_4, gemma_270m


def check_in_place(compiled, pool_bytes: int) -> None:
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eighteen_layers_on_a_cpu(dtype):
    chain = gemma_270m(dtype, implementation="xla")
    compiled = jax.jit(chain, donate_argnums=0).lower(*chain.arguments()).compile()
    check_in_place(compiled, chain.pool_bytes)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
def test_eighteen_layers_compiled_for_a_tpu(chip, implementation):
    chain = gemma_270m("bfloat16", implementation=implementation)
    compiled = compile_for_tpu(chain, chain.arguments(), chip=chip, donate=0)
    check_in_place(compiled, chain.pool_bytes)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_kernels_compile_for_a_tpu_at_other_shapes(chip):
    for chain in (
        gemma_270m("float32", implementation="pallas_tpu", layers=6, tokens=1024),
        gemma_27b_under_4(layers=6),
    ):
        compiled = compile_for_tpu(chain, chain.arguments(), chip=chip, donate=0)
        check_in_place(compiled, chain.pool_bytes)


def test_an_unknown_chip_is_refused():
    with pytest.raises(ValueError, match="unknown chip 'v9', known: v5e, v6e, tpu7x"):
        compile_for_tpu(lambda x: x, (), chip="v9")
