import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.specs import FullAttentionSpec, MLASpec
from pallas_kernels import AttentionPageLayout
from tests.pallas_kernels.cases import round_to, write_token


def test_a_bfloat16_word_holds_k_below_and_v_above():
    layout = AttentionPageLayout.fitting(block_size=2, num_kv_heads=1, head_size=4, dtype="bfloat16")
    k = np.array([[[1.0, 0, 0, 0]]], np.float32)
    v = np.array([[[-2.0, 0, 0, 0]]], np.float32)
    word = int(layout.pack_tokens(jnp.asarray(k), jnp.asarray(v))[0][0, 0, 0])
    assert word == 0xC000_3F80  # bfloat16: -2.0 is C000, 1.0 is 3F80


def test_float32_planes_keep_every_bit():
    layout = AttentionPageLayout.fitting(block_size=2, num_kv_heads=1, head_size=4, dtype="float32")
    k = np.array([[[1.0, 1 / 3, 0, 0]]], np.float32)
    words = layout.pack_tokens(jnp.asarray(k), -jnp.asarray(k))
    np.testing.assert_array_equal([np.asarray(plane).view(np.float32) for plane in words], [k, -k])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "head_size", "head_size_v", "block_size"),
    [(1, 8, 8, 4), (3, 64, 64, 2), (2, 256, 256, 16), (2, 80, 80, 8), (2, 12, 8, 4), (3, 8, 14, 4)],
)
def test_a_page_written_by_definition_reads_back(dtype, heads, head_size, head_size_v, block_size):
    layout = AttentionPageLayout.fitting(
        block_size=block_size,
        num_kv_heads=heads,
        head_size=head_size,
        head_size_v=head_size_v,
        dtype=dtype,
    )
    rng = np.random.default_rng(0)
    k, v = (round_to(dtype, rng.normal(size=(block_size, heads, size))) for size in (head_size, head_size_v))
    page = np.full((layout.page_rows, 128), 0x7FC0_7FC0, np.uint32)
    for slot in range(block_size):
        write_token(layout, page, slot, k[slot], v[slot])
    keys, values = layout.unpack_page(jnp.asarray(page))
    np.testing.assert_array_equal(keys, k.transpose(1, 0, 2))
    np.testing.assert_array_equal(values, v.transpose(1, 0, 2))
    packed = np.concatenate([x.reshape(-1) for x in layout.pack_tokens(jnp.asarray(k), jnp.asarray(v))])
    assert (page.reshape(-1)[: layout.used_words] != 0x7FC0_7FC0).all()
    assert packed.size == layout.used_words
    assert set(packed) == set(page.reshape(-1)[: layout.used_words])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("head_size", "head_size_v"), [(12, 8), (12, 12), (576, 512)])
def test_a_latent_is_kept_once(dtype, head_size, head_size_v):
    layout = AttentionPageLayout.fitting(
        block_size=4, num_kv_heads=1, head_size=head_size, head_size_v=head_size_v, latent=True, dtype=dtype
    )
    assert layout.used_words * 4 == 4 * head_size * np.dtype(jnp.dtype(dtype)).itemsize
    x = round_to(dtype, np.random.default_rng(0).normal(size=(4, 1, head_size)))
    page = np.full((layout.page_rows, 128), 0x7FC0_7FC0, np.uint32)
    for slot in range(4):
        write_token(layout, page, slot, x[slot], x[slot, :, :head_size_v])
    keys, values = layout.unpack_page(jnp.asarray(page))
    np.testing.assert_array_equal(keys, x.transpose(1, 0, 2))
    np.testing.assert_array_equal(values, x.transpose(1, 0, 2)[..., :head_size_v])
    (packed,) = layout.pack_tokens(jnp.asarray(x))
    np.testing.assert_array_equal(packed.reshape(-1), page.reshape(-1)[: layout.used_words])


def test_pages_are_as_large_as_the_planner_says():
    """Bytes of content: no word is lost to sizes that are not powers of two."""
    for heads, size, size_v in [(32, 80, 80), (8, 96, 96), (4, 192, 128), (4, 192, 192)]:
        for dtype in ("bfloat16", "float32"):
            spec = FullAttentionSpec(
                block_size=16, num_kv_heads=heads, head_size=size, head_size_v=size_v, dtype=dtype
            )
            layout = AttentionPageLayout.fitting(
                block_size=16, num_kv_heads=heads, head_size=size, head_size_v=size_v, dtype=dtype
            )
            assert layout.used_words * 4 == spec.unpadded_page_size_bytes
    latent = AttentionPageLayout.fitting(
        block_size=64, num_kv_heads=1, head_size=576, head_size_v=512, latent=True, dtype="bfloat16"
    )
    assert latent.used_words * 4 == MLASpec(block_size=64, head_size=576).unpadded_page_size_bytes


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
        ({"dtype": "int4"}, "dtype must be one of .* got 'int4'"),
        ({"head_size_v": 0}, "head_size_v must be a positive int, got 0"),
        ({"head_size_v": 31, "dtype": "bfloat16"}, r"head_size \+ head_size_v must be even, got 32 \+ 31"),
        ({"head_size_v": 40, "latent": True}, "at most its head_size 32, got 40"),
        ({"head_size_v": 15, "latent": True}, "of a latent must be even, got 32 and 15"),
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
