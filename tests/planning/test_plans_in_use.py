"""Plans of policy split in the cache manager, and how fast planning is loaded."""

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from jaxkv.cache_manager import KVCacheManager
from jaxkv.errors import JaxkvError
from jaxkv.model_config.model_cache import model_cache_from_config
from jaxkv.planning import PlanConfig, make_plan, waste_of
from jaxkv.request import Request
from jaxkv.specs import KVCacheSpec
from tests.model_config.published import read
from tests.planning.layers import chunked, full, layers, mamba, window


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


@pytest.mark.parametrize("policy", ["unified", "split"])
def test_what_no_cache_could_serve_is_not_planned(policy: str) -> None:
    def refused(mix: dict[str, KVCacheSpec], why: str, **options: Any) -> None:
        with pytest.raises(JaxkvError, match=why):
            make_plan(mix, PlanConfig(policy=policy, **options), 2**30)

    for spec in (window(), chunked()):
        mix = layers((2, "full", full()), (2, "other", spec))
        refused(mix, f"size 2: group . of kind '{spec.kind}'", decode_context_parallel_size=2)
    draft = dataclasses.replace(mamba(), is_draft=True)
    refused(layers((2, "full", full()), (2, "draft", draft)), "EAGLE group of recurrent", use_eagle=True)


def test_importing_jaxkv_takes_less_than_a_fifth_of_a_second() -> None:
    code = "import time; start = time.process_time(); import jaxkv; print(time.process_time() - start)"
    best = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    )
    assert best < 0.2
