import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionPageLayout
from tests.pallas_kernels.cases import round_to, write_token


def test_a_bfloat16_word_holds_k_below_and_v_above():
    layout = AttentionPageLayout.fitting(block_size=2, num_kv_heads=1, head_size=4, dtype="bfloat16")
    k = np.array([[[1.0, 0, 0, 0]]], np.float32)
    v = np.array([[[-2.0, 0, 0, 0]]], np.float32)
    word = int(layout.pack_tokens(jnp.asarray(k), jnp.asarray(v))[0, 0, 0, 0])
    assert word == 0xC000_3F80  # bfloat16: -2.0 is C000, 1.0 is 3F80


def test_float32_planes_keep_every_bit():
    layout = AttentionPageLayout.fitting(block_size=2, num_kv_heads=1, head_size=4, dtype="float32")
    k = np.array([[[1.0, 1 / 3, 0, 0]]], np.float32)
    words = np.asarray(layout.pack_tokens(jnp.asarray(k), -jnp.asarray(k)))
    assert words.shape == (1, 1, 2, 4)
    np.testing.assert_array_equal(words[0, 0].view(np.float32), np.stack([k[0, 0], -k[0, 0]]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "head_size", "block_size"), [(1, 8, 4), (3, 64, 2), (2, 256, 16)])
def test_a_page_written_by_definition_reads_back(dtype, heads, head_size, block_size):
    layout = AttentionPageLayout.fitting(
        block_size=block_size, num_kv_heads=heads, head_size=head_size, dtype=dtype
    )
    rng = np.random.default_rng(0)
    k, v = round_to(dtype, rng.normal(size=(2, block_size, heads, head_size)))
    page = np.full((layout.page_rows, 128), 0x7FC0_7FC0, np.uint32)
    for slot in range(block_size):
        write_token(layout, page, slot, k[slot], v[slot])
    keys, values = layout.unpack_page(jnp.asarray(page))
    np.testing.assert_array_equal(keys, k.transpose(1, 0, 2))
    np.testing.assert_array_equal(values, v.transpose(1, 0, 2))
    packed = np.asarray(layout.pack_tokens(jnp.asarray(k), jnp.asarray(v)))
    assert (page.reshape(-1)[: layout.used_words] != 0x7FC0_7FC0).all()
    assert packed.size == layout.used_words
    assert set(packed.reshape(-1)) == set(page.reshape(-1)[: layout.used_words])


def test_the_smallest_page_is_a_whole_tile():
    layout = AttentionPageLayout.fitting(block_size=4, num_kv_heads=1, head_size=8, dtype="bfloat16")
    assert (layout.used_words, layout.page_rows) == (32, 8)
    gemma = AttentionPageLayout.fitting(block_size=16, num_kv_heads=1, head_size=256, dtype="float32")
    assert (gemma.used_words, gemma.page_rows) == (8192, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size must be a positive int, got 0"),
        ({"head_size": 1.5}, "head_size must be a positive int, got 1.5"),
        ({"dtype": "int8"}, "dtype must be one of .* got 'int8'"),
        ({"page_rows": 12}, "page_rows must be a multiple of 8, got 12"),
        ({"page_rows": 8, "block_size": 64}, "needs 2048 words, page_rows=8 has 1024"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(change, message):
    good = {"block_size": 4, "num_kv_heads": 1, "head_size": 32, "dtype": "bfloat16", "page_rows": 8}
    with pytest.raises(ValueError, match=message):
        AttentionPageLayout(**(good | change))


def test_an_unknown_dtype_is_refused_when_fitting():
    with pytest.raises(ValueError, match="got 'float8'"):
        AttentionPageLayout.fitting(block_size=4, num_kv_heads=1, head_size=32, dtype="float8")
