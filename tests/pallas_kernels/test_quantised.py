"""Pages of 8-bit numbers: what is kept, and attention over it, against numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import AttentionPageLayout, GroupTable, RaggedBatch, paged_attention, write_kv
from pallas_kernels.aot import compile_for_tpu
from pallas_kernels.quantised import quantise
from tests.pallas_kernels import checking
from tests.pallas_kernels.cases import round_to
from tests.pallas_kernels.quantised_cases import (
    QuantisedStep,
    make_quantised_step,
    quantise_by_hand,
)

DTYPES = ["int8", "float8_e4m3fn"]


def check(case: QuantisedStep, implementation: str, **rest) -> None:
    """Holds both results against the definitions."""
    checking.check(case.step, case.written, implementation, **rest)


@pytest.mark.parametrize(
    ("implementation", "dtype", "window", "chunk"),
    [
        ("xla", "int8", None, None),
        ("reference", "int8", None, 6),
        ("xla", "float8_e4m3fn", 9, None),
        ("reference", "float8_e4m3fn", None, None),
    ],
)
def test_mixed_steps_of_every_length_around_a_page(implementation, window, chunk, dtype):
    case = make_quantised_step(
        dtype=dtype,
        seq_lens=[1, 3, 4, 5, 40, 1, 3, 4, 5, 41],
        query_lens=[1, 1, 1, 1, 1, 1, 3, 4, 5, 17],
        window=window,
        chunk=chunk,
        spare_tokens=3,
        spare_rows=2,
    )
    check(case, implementation, window=window, chunk=chunk)


@pytest.mark.parametrize(
    ("implementation", "dtype", "heads", "group", "head_size"),
    [("xla", "int8", 3, 2, 16), ("xla", "float8_e4m3fn", 2, 1, 80), ("reference", "int8", 2, 1, 80)],
)
def test_heads_of_many_sizes(implementation, heads, group, head_size, dtype):
    case = make_quantised_step(
        dtype=dtype,
        seq_lens=[9, 6, 14],
        query_lens=[1, 6, 5],
        heads=heads,
        group=group,
        head_size=head_size,
    )
    sinks = np.linspace(-3, 3, heads * group, dtype=np.float32)
    check(case, implementation, softcap=2.0, sinks=sinks)


def test_long_sequences_in_pages_whose_scales_are_whole_rows():
    case = make_quantised_step(
        dtype="int8",
        seq_lens=[2300, 333],
        query_lens=[1, 303],
        block_size=128,
        spare_tokens=7,
        activation_dtype="bfloat16",
    )
    check(case, "xla")


def test_no_float8_is_kept_as_minus_zero():
    """It would be NaN to the matrix units of v5 and v6."""
    kept = quantise(jnp.asarray([448.0, -1e-5, -0.0, -0.01], jnp.float32), "float8_e4m3fn")
    assert kept.bits.tolist() == [0x7E, 0, 0, 0x85]  # the last five times 2^-9, its smallest


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_kept_is_as_near_as_its_type_allows(dtype):
    """int8: half a step of amax / 127. e4m3: 1/16 of the number (half of the last of three mantissa bits), or
    half of the smallest step, 2**-10, in scales of amax / 448.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 2, 32)) * 10.0 ** rng.integers(-6, 6, size=(64, 2, 1))
    x = x.astype(np.float32)
    layout = AttentionPageLayout.fitting(block_size=64, num_kv_heads=2, head_size=32, dtype=dtype)
    words = layout.pack_tokens(jnp.asarray(x), jnp.asarray(-x))
    page = np.zeros((layout.page_rows * 128,), np.uint32)
    for plane, of_plane in enumerate(words):
        for head in range(2):
            start = layout.first_word(head, plane)
            page[start : start + of_plane[:, head].size] = np.asarray(of_plane[:, head]).reshape(-1)
    keys, values = layout.unpack_page(jnp.asarray(page.reshape(-1, 128)))
    np.testing.assert_array_equal(keys, -values)
    amax = np.abs(x.astype(np.float64)).max(axis=-1, keepdims=True)
    if dtype == "int8":
        bound = np.broadcast_to(amax / 127 / 2, x.shape)
    else:
        bound = np.maximum(np.abs(x.astype(np.float64)) * 2.0**-4, amax / 448 * 2.0**-10)
    enlarged = 127 * 2.0**-18  # steps at most by which numbers are enlarged before they are rounded
    apart = np.abs(np.asarray(keys, np.float64).transpose(1, 0, 2) - x)
    assert (apart <= bound * (1 + 2 * enlarged)).all()
    assert apart.max() > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_all_magnitudes_are_quantised_as_in_numpy(dtype):
    rng = np.random.default_rng(1)
    x = round_to("bfloat16", rng.normal(size=(256, 64)) * 2.0 ** rng.integers(-20, 4, size=(256, 64)))
    small = jax.jit(quantise, static_argnums=1)(x, dtype)
    for row, bits, scale in zip(x, np.asarray(small.bits), np.asarray(small.scale), strict=True):
        expected_bits, expected_scale = quantise_by_hand(dtype, row)
        np.testing.assert_array_equal(bits, expected_bits)
        assert scale[0] == expected_scale


def test_half_way_between_two_numbers_is_away_from_zero():
    """127 is the largest: the scale is 1. Of e4m3, 448 is; between 16 and 18 there is none."""
    x = jnp.array([[127.0, 0.5, 1.5, 2.5, -2.5, 3.49]])
    np.testing.assert_array_equal(quantise(x, "int8").bits, [[127, 1, 2, 3, 256 - 3, 3]])
    x = jnp.array([[448.0, 17.0, -17.0, 19.0]])
    numbers = np.asarray(quantise(x, "float8_e4m3fn").bits, np.uint8).view(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(numbers.astype(np.float32), [[448, 18, -18, 20]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden(dtype):
    for zeros in (jnp.zeros((2, 8)), jnp.full((2, 8), 1e-38)):
        assert not np.asarray(quantise(zeros, dtype).bits).any()
    assert not np.asarray(quantise(jnp.zeros((2, 8)), dtype).scale).any()
    layout = AttentionPageLayout.fitting(block_size=8, num_kv_heads=1, head_size=2, dtype=dtype)
    for wrong in (np.nan, np.inf, -np.inf):
        x = jnp.array([[[1.0, wrong]]])
        kept = layout.join(layout.strips(layout.pack_tokens(x, x)))
        assert np.isnan(kept).all(), wrong


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_smallest_numbers_keep_their_scale(dtype):
    """Nothing overflows or is lost on the way: int8 is half a step off, 1/254 of the largest, e4m3 exact."""
    most = np.finfo(np.float32).max
    layout = AttentionPageLayout.fitting(block_size=8, num_kv_heads=1, head_size=2, dtype=dtype)
    for largest in (most, 1e20, 1e-20, 2e-30):
        x = np.array([[[largest, -largest / 2]]], np.float32)
        kept = layout.join(layout.strips(layout.pack_tokens(jnp.asarray(x), jnp.asarray(-x))))
        np.testing.assert_allclose(kept.keys, x, rtol=0, atol=largest / 253)
        np.testing.assert_array_equal(kept.values, -np.asarray(kept.keys))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_is_as_large_as_a_spec_says(dtype):
    """Two bytes for an element's K and V and eight of scales for each token and head, and no more."""
    layout = AttentionPageLayout.fitting(block_size=128, num_kv_heads=4, head_size=128, dtype=dtype)
    assert layout.used_words * 4 == 128 * 4 * (2 * 128 + 8) == 33 * 4096
    assert layout.page_rows == 33 * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_size": 33}, "hold K and V of one even size, got 33 and 33"),
        ({"head_size_v": 16}, "hold K and V of one even size, got 32 and 16"),
        ({"latent": True}, "hold K and V of one even size, got a latent of 32 and 32"),
    ],
)
def test_what_has_no_place_in_such_a_page_is_refused(change, message):
    good = {"block_size": 4, "num_kv_heads": 1, "head_size": 32, "dtype": "int8"}
    with pytest.raises(ValueError, match=message):
        AttentionPageLayout.fitting(**(good | change))


@pytest.mark.parametrize("chip", [None, "v5e"])
def test_the_pool_is_updated_in_place(chip):
    """By XLA on this machine, by the Pallas kernels compiled for a TPU."""
    layout = AttentionPageLayout.fitting(block_size=128, num_kv_heads=2, head_size=128, dtype="int8")
    tokens, rows = 16, 8
    pool_bytes = 1000 * layout.page_rows * 512

    def zeros():
        def ints(*shape: int) -> jax.Array:
            return jnp.zeros(shape, jnp.int32)

        kv = jnp.zeros((tokens, 2, 128), jnp.bfloat16)
        return (
            jnp.zeros((1000, layout.page_rows, 128), jnp.uint32),
            jnp.zeros((tokens, 4, 128), jnp.bfloat16),
            *(kv, kv),
            RaggedBatch(ints(tokens), ints(tokens), ints(rows + 1), ints(rows), ints(), ints()),
            GroupTable(ints(rows, 8), ints(rows)),
        )

    def step(pages, q, k, v, batch, table):
        place = {"layout": layout, "layer_slot": 0, "layer_slots": 1}
        place["implementation"] = "xla" if chip is None else "pallas_tpu"
        pages = write_kv(pages, k, v, batch, table, **place)
        return pages, paged_attention(q, pages, batch, table, scale=0.1, sliding_window=200, **place)

    arguments = jax.eval_shape(zeros)
    if chip is None:
        compiled = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    else:
        compiled = compile_for_tpu(step, arguments, chip=chip, donate=0)
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 8
