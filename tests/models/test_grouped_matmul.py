"""The grouped matmul of TPUs, run by the interpreter, against a product for each group in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.grouped_matmul import MEMORY_BYTES, can_multiply, choose_tiles, grouped_matmul
from models.moe import Experts, Routing
from pallas_kernels.aot import compile_for_tpu

INNER, COLUMNS = 40, 24
# A unit in the last place of the results, which are near 8, and of sums in float32.
TOLERANCE = {"bfloat16": 2**-5, "float32": 2**-18}


def compared(counts: list[int], num_rows: int, inner: int, columns: int, dtype: str) -> None:
    rng = np.random.default_rng(num_rows)
    x = jnp.asarray(rng.standard_normal((num_rows, inner)), dtype).at[sum(counts) :].set(jnp.nan)
    weights = jnp.asarray(rng.standard_normal((len(counts), columns, inner)) / inner**0.5, dtype)
    out = grouped_matmul(x, weights, jnp.asarray(counts), interpret=True)
    assert out.shape == (num_rows, columns)
    assert out.dtype == dtype
    wide_x, wide_weights = (np.asarray(array, np.float64) for array in (x, weights))
    group = np.repeat(np.arange(len(counts)), counts)
    expected = [wide_weights[g] @ row for row, g in zip(wide_x, group, strict=False)]
    np.testing.assert_allclose(
        np.asarray(out, np.float64)[: sum(counts)],
        np.reshape(expected, (-1, columns)),
        rtol=0,
        atol=TOLERANCE[dtype],
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("counts", "num_rows"),
    [
        ([0, 5, 1, 33, 0, 8], 47),  # empty groups, and groups that share a tile
        ([0, 5, 1, 33, 0, 8], 300),  # tiles that no group reaches
        ([0, 0, 64, 64, 0, 0], 128),  # groups that end with a tile
        ([201], 201),
        ([1], 1),
        ([0, 0, 0], 7),
        ([0, 0, 0, 3], 3),
    ],
)
def test_each_group_meets_its_own_matrix(counts, num_rows, dtype):
    compared(counts, num_rows, INNER, COLUMNS, dtype)


def test_sums_and_columns_that_are_no_multiple_of_a_tile(monkeypatch):
    monkeypatch.setattr("models.grouped_matmul.MEMORY_BYTES", 2**19)
    tiles = choose_tiles(21, 360, 520, groups=3, itemsize=4)
    assert 360 % tiles.inner
    assert 520 % tiles.columns
    compared([8, 0, 9], 21, 360, 520, "float32")


def test_matrices_that_a_tpu_keeps_with_columns_last():
    compared([8, 0, 9], 21, 40, 256, "bfloat16")


SIZES = {
    "gpt-oss": (128, 4, 2880, 2880),
    "granite": (62, 6, 1536, 512),
    "jamba-1.5-mini": (16, 2, 4096, 14336),
    "nemotron": (128, 6, 2688, 1856),
    "qwen3-next": (512, 10, 2048, 512),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_the_core_and_the_layout(name, tokens, itemsize):
    groups, chosen, hidden, inner_size = SIZES[name]
    for inner, columns in ((hidden, 2 * inner_size), (inner_size, hidden)):
        rows, summed, wide = choose_tiles(tokens * chosen, inner, columns, groups=groups, itemsize=itemsize)
        assert rows % 16 == 0
        assert summed % 128 == 0 or summed == inner
        assert wide % 128 == 0 or wide == columns
        assert 2 * (rows * summed + summed * wide + rows * wide) * itemsize + 4 * rows * wide <= MEMORY_BYTES


def test_rows_of_a_small_group_read_their_matrix_once_and_nearly_whole():
    assert choose_tiles(640, 2048, 1024, groups=512, itemsize=2) == (128, 2048, 1024)
    assert choose_tiles(640, 512, 2048, groups=512, itemsize=2) == (128, 512, 2048)


def test_long_sums_over_large_groups_take_more_rows_at_once():
    """Of a sum in parts, a matrix is read again for each tile of rows."""
    tiles = choose_tiles(16384, 14336, 4096, groups=16, itemsize=2)
    assert tiles.inner < 14336
    assert tiles.rows > 128


@pytest.mark.parametrize(
    ("inner", "columns", "dtype"),
    [(2048, 1024, "bfloat16"), (1856, 2688, "bfloat16"), (2688, 100, "float32")],
)
def test_no_weights_are_copied(inner, columns, dtype):
    """Where an axis is whole rows of lanes, in whatever order a TPU keeps the axes."""
    weights = jax.ShapeDtypeStruct((16, columns, inner), dtype)
    assert can_multiply(weights)
    x, counts = jax.ShapeDtypeStruct((64, inner), dtype), jax.ShapeDtypeStruct((16,), jnp.int32)
    memory = compile_for_tpu(grouped_matmul, [x, weights, counts], chip="v5e").memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2**21 < weights.size * weights.dtype.itemsize


@pytest.mark.parametrize(("shape", "dtype"), [((16, 2880, 2880), "bfloat16"), ((16, 512, 256), "float16")])
def test_weights_that_the_kernel_does_not_take(shape, dtype):
    assert not can_multiply(jax.ShapeDtypeStruct(shape, dtype))


def test_an_expert_layer_of_qwen3_next_compiles_for_a_tpu():
    groups, chosen, hidden, inner_size = SIZES["qwen3-next"]
    tokens = 64

    def layer(
        gate_up: jax.Array, down: jax.Array, x: jax.Array, chosen: jax.Array, weights: jax.Array
    ) -> jax.Array:
        experts = Experts(1, 1, 1, jnp.dtype("bfloat16"))
        experts.gate_up.set_value(gate_up)
        experts.down.set_value(down)
        return experts(x, Routing(chosen, weights), jnp.int32(tokens))

    described = jax.ShapeDtypeStruct
    compiled = compile_for_tpu(
        layer,
        [
            described((groups, 2 * inner_size, hidden), jnp.bfloat16),
            described((groups, hidden, inner_size), jnp.bfloat16),
            described((tokens, hidden), jnp.bfloat16),
            described((tokens, chosen), jnp.int32),
            described((tokens, chosen), jnp.float32),
        ],
        chip="v6e",
    )
    text = compiled.as_text()
    assert text is not None
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    memory = compiled.memory_analysis()
    assert memory is not None
    # A copy of the weights would take 3 GB.
    assert memory.temp_size_in_bytes < 100e6
