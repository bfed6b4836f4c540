"""The donated pool is updated where it lies: memory analysis of compiled chains of layers."""

import jax
import pytest

from pallas_kernels import AttentionPageLayout
from pallas_kernels.aot import compile_for_tpu
from tests.pallas_kernels.chain import gemma_27b_under_4, gemma_270m, of_layout

LAYERS = 7  # every layer slot twice, the sixth layer full and one after it


def check_in_place(compiled, pool_bytes: int) -> None:
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_on_a_cpu(dtype):
    chain = gemma_270m(dtype, implementation="xla", layers=LAYERS)
    compiled = jax.jit(chain, donate_argnums=0).lower(*chain.arguments()).compile()
    check_in_place(compiled, chain.pool_bytes)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_layers_compiled_for_a_tpu(chip):
    chain = gemma_270m("bfloat16", implementation="pallas_tpu", layers=LAYERS)
    compiled = compile_for_tpu(chain, chain.arguments(), chip=chip, donate=0)
    check_in_place(compiled, chain.pool_bytes)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_other_shapes_compiled_for_a_tpu(chip):
    for chain in (
        gemma_270m("float32", implementation="pallas_tpu", layers=1, tokens=1024),
        gemma_27b_under_4(layers=1),
    ):
        compiled = compile_for_tpu(chain, chain.arguments(), chip=chip, donate=0)
        check_in_place(compiled, chain.pool_bytes)


@pytest.mark.parametrize(
    ("q_heads", "sizes"),
    [
        (8, {"num_kv_heads": 8, "head_size": 80}),
        (16, {"num_kv_heads": 1, "head_size": 192, "head_size_v": 128}),
        (16, {"num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "latent": True}),
    ],
    ids=["80", "192-128", "latents"],
)
def test_rows_that_tokens_share_compiled_for_a_tpu(q_heads, sizes):
    layout = AttentionPageLayout.fitting(block_size=64, dtype="bfloat16", **sizes)
    chain = of_layout(layout, q_heads=q_heads)
    compiled = compile_for_tpu(chain, chain.arguments(), chip="v5e", donate=0)
    check_in_place(compiled, chain.pool_bytes)


def test_the_xla_form_compiled_for_a_tpu():
    chain = gemma_270m("bfloat16", implementation="xla", layers=LAYERS)
    compiled = compile_for_tpu(chain, chain.arguments(), chip="v5e", donate=0)
    check_in_place(compiled, chain.pool_bytes)


def test_an_unknown_chip_is_refused():
    with pytest.raises(ValueError, match="unknown chip 'v9', known: v4, v5e, v5p, v6e, tpu7x"):
        compile_for_tpu(lambda x: x, (), chip="v9")
