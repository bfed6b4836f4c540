"""The table of tuned sizes: what it holds, and what is looked up in it."""

import json
from dataclasses import replace

import pytest

from pallas_kernels import AttentionPageLayout
from pallas_kernels.aot import TPU_TOPOLOGIES
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu import tuning
from pallas_kernels.tpu.tuning import TABLE, Shape, Sizes, forced, sizes_of

RULE = Sizes(tokens=2048, most=8)
LAYER = AttentionSettings(
    layout=AttentionPageLayout.fitting(block_size=16, num_kv_heads=2, head_size=128, dtype="bfloat16"),
    layer_slot=0,
    layer_slots=1,
    sliding_window=100,
)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table with one entry, for `LAYER` under groups of 4 query heads where kernels are interpreted."""
    shape = Shape(
        kernel="decode",
        chip="",
        dtype="bfloat16",
        kv_heads=2,
        group=4,
        head_size=128,
        head_size_v=128,
        latent=False,
        block_size=16,
        window=100,
    )
    row = {"shape": shape._asdict(), "sizes": {"tokens": 256, "most": 16}}
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps([row]), encoding="utf-8")
    monkeypatch.setattr(tuning, "TABLE", path)
    caches = (tuning._table, tuning._tuned)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("table")
def test_a_shape_of_the_table_gets_its_sizes_and_others_the_rule(caplog):
    with caplog.at_level("INFO"):
        assert [sizes_of("decode", LAYER, 4, RULE) for _ in range(2)] == [Sizes(256, 16)] * 2
    assert len(caplog.messages) == 1
    assert sizes_of("decode", LAYER, 8, RULE) == RULE
    assert sizes_of("prefill", LAYER, 4, RULE) == RULE
    other_v = replace(LAYER, layout=replace(LAYER.layout, head_size_v=64))
    assert sizes_of("decode", other_v, 4, RULE) == RULE
    with forced(Sizes(512, 4)):
        assert sizes_of("decode", LAYER, 4, RULE) == Sizes(512, 4)


def test_every_entry_gains_three_percent_on_a_known_chip():
    for row in json.loads(TABLE.read_text(encoding="utf-8")):
        assert Shape(**row["shape"]).chip in TPU_TOPOLOGIES
        assert Sizes(**row["sizes"]) > (0, 0)
        assert row["us"]["tuned"] <= 0.97 * row["us"]["rule"]
