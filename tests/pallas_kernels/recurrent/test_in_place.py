"""The donated pool is updated where it lies: memory analysis of what is compiled, for a CPU and for TPUs."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import RaggedBatch
from pallas_kernels.aot import compile_for_tpu
from pallas_kernels.recurrent import StateLayout, StateTable
from tests.pallas_kernels.recurrent.recurrences import (
    Operation,
    convolution,
    convolved_delta,
    delta,
    mamba1,
    mamba2,
)
from tests.pallas_kernels.recurrent.steps import make_step

PAGE_ROWS, NUM_PAGES = 128, 2048
POOL_BYTES = PAGE_ROWS * 512 * NUM_PAGES


def compile_chain(
    operation: Operation,
    implementation: str,
    *,
    chip: str | None,
    tokens: int,
    layers: int = 2,
    decode_only=False,
):
    """Layers one after the other, each with states of its own: compiled with a pool of 128 MiB."""
    rows, kept = 4, 1
    count = len(operation.shapes)
    layout = StateLayout(shapes=operation.shapes, dtypes=("float32",) * count, page_rows=PAGE_ROWS)
    step = make_step(operation, [], spare_tokens=tokens)
    part = {"part": 0} if count == 1 else {"parts": (0, 1)}

    def chain(pages, inputs, batch, table):
        out = None
        for layer in range(layers):
            out, pages = operation.run(
                inputs,
                operation.weights,
                pages,
                batch,
                table,
                layout=layout,
                **part,
                layer_slot=layer * layout.num_pages,
                layer_slots=layers * layout.num_pages,
                implementation=implementation,
            )
        return pages, out

    def ints(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    table = StateTable(ints(rows, 1), ints(rows, 1), ints(rows, kept), ints(rows, kept, 1))
    lengths = (ints(tokens), ints(tokens), ints(rows + 1), ints(rows), ints(), ints())
    batch = RaggedBatch(*lengths, decode_only=decode_only)
    pages = jax.ShapeDtypeStruct((NUM_PAGES, PAGE_ROWS, 128), jnp.uint32)
    arguments = (pages, step.tokens, batch, table)
    if chip is not None:
        return compile_for_tpu(chain, arguments, chip=chip, donate=0)
    return jax.jit(chain, donate_argnums=0).lower(*arguments).compile()


def check_in_place(compiled) -> None:
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == POOL_BYTES
    assert memory.temp_size_in_bytes < POOL_BYTES / 8


@pytest.mark.parametrize(
    "operation",
    [convolution(1024), mamba1(1024, 16), mamba2(16, 64, 128), delta(4, 8, 128, 128)],
    ids=lambda operation: operation.name,
)
def test_two_layers_on_a_cpu(operation):
    check_in_place(compile_chain(operation, "xla", chip=None, tokens=32))


@pytest.mark.parametrize("decode_only", [True, False])
@pytest.mark.parametrize(
    "operation",
    [mamba1(1024, 16), mamba2(2, 64, 128), delta(1, 1, 16, 128)],
    ids=lambda operation: operation.name,
)
def test_two_layers_by_numba(operation, decode_only):
    check_in_place(compile_chain(operation, "numba", chip=None, tokens=32, decode_only=decode_only))


@pytest.mark.parametrize("decode_only", [True, False])
@pytest.mark.parametrize(
    "operation", [mamba1(128, 8), mamba2(2, 64, 8), delta(1, 1, 8, 128)], ids=lambda operation: operation.name
)
def test_states_of_a_single_tile_on_a_cpu(operation, decode_only):
    """XLA unrolls a loop of one turn, and copied the pool between what was in it and the loops around."""
    check_in_place(compile_chain(operation, "xla", chip=None, tokens=32, layers=1, decode_only=decode_only))


def test_a_convolution_and_the_delta_rule_of_decodes_compiled_for_a_tpu():
    operation, tokens = convolved_delta(1, 2, 128), {"tokens": 4, "layers": 1, "decode_only": True}
    check_in_place(compile_chain(operation, "pallas_tpu", chip="tpu7x", **tokens))


@pytest.mark.parametrize(
    ("operation", "chip"),
    [
        (convolution(1024), "v5e"),
        (mamba1(1024, 16), "tpu7x"),
        (mamba2(4, 64, 128), "v6e"),
        (delta(1, 2, 128, 128), "v5e"),
    ],
    ids=["conv, v5e", "mamba1, tpu7x", "mamba2, v6e", "delta, v5e"],
)
def test_one_layer_compiled_for_a_tpu(operation, chip):
    check_in_place(compile_chain(operation, "pallas_tpu", chip=chip, tokens=64, layers=1))
