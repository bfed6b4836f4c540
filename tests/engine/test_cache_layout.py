"""From a plan to the layouts of pages."""

import pytest

from jaxkv import JaxkvError
from jaxkv.engine.cache_layout import cache_layout
from jaxkv.kv_cache_dtype import kept_in
from jaxkv.planning import PlanConfig, make_plan
from jaxkv.specs import FullAttentionSpec
from pallas_kernels import AttentionPageLayout


def test_values_of_another_size_fill_the_planned_page():
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=192, head_size_v=128)
    plan = make_plan({"layer": spec}, PlanConfig(max_model_len=64, max_num_seqs=1), 1 << 20)
    assert plan.page_size_bytes == 16 * 2 * (192 + 128) * 2
    layout = cache_layout(plan).place("layer").layout
    assert layout == AttentionPageLayout.fitting(
        block_size=16, num_kv_heads=2, head_size=192, head_size_v=128, dtype="bfloat16"
    )
    assert layout.page_rows * 512 == plan.page_size_bytes


def test_what_has_no_place_in_pages_of_8_bits_is_refused_by_name():
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=192, head_size_v=128)
    plan = make_plan({"layer": kept_in(spec, "int8")}, PlanConfig(max_model_len=64, max_num_seqs=1), 1 << 20)
    with pytest.raises(JaxkvError, match=r"layer 'layer' cannot be kept in int8: .* got 192 and 128"):
        cache_layout(plan)
