"""The cache as a layer sees it."""

import jax.numpy as jnp
import pytest

from models.paged_cache import CacheLayout, LayerPlace, PagedCache
from pallas_kernels import AttentionPageLayout, GroupTable, RaggedBatch, operations


@pytest.fixture
def cache() -> PagedCache:
    """One sequence of one token in block 1; the kernels are those called "recorded"."""
    page = AttentionPageLayout.fitting(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    batch = RaggedBatch(
        positions=jnp.zeros(1, jnp.int32),
        seq_ids=jnp.zeros(1, jnp.int32),
        query_starts=jnp.array([0, 1], jnp.int32),
        seq_lens=jnp.ones(1, jnp.int32),
        num_decodes=jnp.int32(1),
        num_seqs=jnp.int32(1),
    )
    return PagedCache(
        pages=jnp.zeros((2, page.page_rows, 128), jnp.uint32),
        batch=batch,
        tables=(GroupTable(block_ids=jnp.ones((1, 1), jnp.int32), first_block=jnp.zeros(1, jnp.int32)),),
        layout=CacheLayout((("layer", LayerPlace(0, 0, page)),), layer_slots=1, implementation="recorded"),
    )


def test_the_kernels_asked_for_by_name_write_and_attend(cache, monkeypatch):
    calls = []
    plain = operations.IMPLEMENTATIONS["reference"]

    def attend(*args):
        calls.append("attend")
        return plain.attend(*args)

    def write(*args):
        calls.append("write")
        return plain.write(*args)

    recorded = plain._replace(attend=attend, write=write)
    monkeypatch.setitem(operations.IMPLEMENTATIONS, "recorded", recorded)
    tokens = jnp.ones((1, 1, 8))
    out, after = cache.attend("layer", tokens, tokens, 3 * tokens, scale=1.0)
    assert calls == ["write", "attend"]
    assert (out == 3).all()
    assert (after.pages != cache.pages).any()
