"""From a plan to the layouts of pages."""

from jaxkv.engine.cache_layout import cache_layout
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
