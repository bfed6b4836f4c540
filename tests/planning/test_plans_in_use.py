"""Plans of policy split in the cache manager, and how fast planning is loaded."""

import subprocess
import sys

import numpy as np
import pytest

from jaxkv.cache_manager import KVCacheManager
from jaxkv.model_config.model_cache import model_cache_from_config
from jaxkv.planning import PlanConfig, make_plan, waste_of
from jaxkv.request import Request
from tests.model_config.published import read


@pytest.mark.parametrize(
    "name", ["qwen3.5-9b", "lfm3-1.7b", "falcon-h1-tiny-90m", "gemma-4-e2b", "baichuan-m1-14b"]
)
def test_a_request_holds_the_blocks_that_the_plan_says(name: str) -> None:
    cache = model_cache_from_config(read(name))
    config = PlanConfig(max_model_len=4096, max_num_batched_tokens=1024, num_gpu_blocks_override=4000)
    plan = make_plan(cache.specs(16), config, 2**40)
    manager = KVCacheManager(plan, max_num_seqs=2)
    tokens = np.arange(1000, dtype=np.int32)
    request = Request("a", tokens)
    request.block_hashes(manager.hasher)
    boundary = 999 // plan.scheduler_block_size * plan.scheduler_block_size
    for end in (boundary, 1000):
        assert manager.allocate_slots(request, end - request.num_computed_tokens) is not None
        request.num_computed_tokens = end
        manager.new_step_starts()
        manager.check_integrity()
    held = plan.usable_blocks - manager.num_free_blocks
    assert held * plan.bytes_per_block <= waste_of(plan, 1000).held_bytes + plan.bytes_per_block * len(
        plan.groups
    )
    assert held <= sum(plan.blocks_per_request)
    manager.free(request)
    manager.check_integrity()
    assert manager.num_free_blocks == plan.usable_blocks
    again = Request("b", np.concatenate([tokens, tokens[:5]]))
    again.block_hashes(manager.hasher)
    assert manager.get_computed_blocks(again).num_tokens == boundary


def test_importing_jaxkv_takes_less_than_a_fifth_of_a_second() -> None:
    code = "import time; start = time.process_time(); import jaxkv; print(time.process_time() - start)"
    best = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    )
    assert best < 0.2
