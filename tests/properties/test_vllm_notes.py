"""Faults of vLLM 0.33 that show only in whole schedules and plans, and what is right instead.

The others are held where their part is tested: single look-ups and allocations in
tests/core/test_edge_cases.py and tests/core/test_vllm_faults.py, siblings in one step in tests/scheduling,
concurrency in tests/planning.
"""

from typing import Any

import pytest

from jaxkv.planning.make_plan import make_plan
from jaxkv.planning.plan import PlanConfig
from jaxkv.planning.waste import waste_of
from jaxkv.scenario.run import run_scenario
from jaxkv.scenario.scenario import parse_scenario
from jaxkv.specs import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

FULL = {"kind": "full", "num_kv_heads": 2, "head_size": 64}
WINDOW = {"kind": "sliding_window", "num_kv_heads": 2, "head_size": 64, "sliding_window": 32}


def schedule(num_blocks: int, requests: list[dict[str, Any]], **config: Any) -> dict[str, Any]:
    """A schedule over full attention and two window groups with blocks of 4."""
    defaults = {"max_model_len": 128, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    return run_scenario(
        parse_scenario(
            {
                "mode": "replay",
                "config": defaults | config,
                "groups": [{"spec": FULL}, {"spec": WINDOW}, {"spec": WINDOW}],
                "num_blocks": num_blocks,
                "schedule": {"requests": requests},
            }
        )
    )


def request(name: str, shared: int, fresh: int, **more: Any) -> dict[str, Any]:
    """A prompt of `shared` tokens that all have in common and `fresh` ones of its own."""
    seed = 100 + sum(map(ord, name))
    tokens = {"concat": [{"seed": 1, "len": shared}, {"seed": seed, "len": fresh}]}
    return {"id": name, "tokens": tokens, "output_len": 8, **more}


@pytest.mark.parametrize("num_blocks", range(56, 90, 3))
@pytest.mark.parametrize("interval", [0, None])
def test_after_a_hit_the_gate_counts_windows_as_the_steps_do(num_blocks: int, interval: int | None) -> None:
    """Under-counted, a request was let in after its hit and then preempted itself four times."""
    requests = [
        request("first", 80, 8),
        *(request(name, 64 + 4 * i, 24, arrival_step=18 + i) for i, name in enumerate("abcd")),
    ]
    answer = schedule(num_blocks, requests, prefix_cache_retention_interval=interval)
    assert all(entry["finished_step"] is not None for entry in answer["requests"].values())
    assert max(entry["preemptions"] for entry in answer["requests"].values()) <= 1
    if num_blocks >= 62:
        # Smaller pools leave no room for the shared prefix while somebody runs.
        assert sum(entry["hit_tokens"] > 0 for entry in answer["requests"].values()) >= 3
    assert answer["final_free_blocks"] == num_blocks - 1


def test_the_second_of_two_admitted_requests_is_not_preempted_while_it_reads_its_prompt() -> None:
    """The pool holds one prompt at its peak, and not two: the second waits rather than lose its blocks."""
    alone = 22 + 2 * 12
    answer = schedule(alone + 12, [request("one", 0, 80), request("two", 0, 80)])
    assert [entry["preemptions"] for entry in answer["requests"].values()] == [0, 0]


def big_model(num_full: int, num_window: int) -> dict[str, KVCacheSpec]:
    full = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=128)
    window = SlidingWindowSpec(block_size=16, num_kv_heads=4, head_size=128, sliding_window=1024)
    layers: dict[str, KVCacheSpec] = {f"window.{i}": window for i in range(num_window)}
    return layers | {f"full.{i}": full for i in range(num_full)}


def test_one_odd_layer_does_not_make_62_groups() -> None:
    layers = big_model(1, 61)
    config: dict[str, Any] = {"max_model_len": 32768, "page_alignment_bytes": 1}
    assert len(make_plan(layers, PlanConfig(policy="unified", **config), 1 << 34).groups) == 62
    split = make_plan(layers, PlanConfig(policy="split", **config), 1 << 34)
    assert len(split.groups) <= 32


def test_a_small_attention_page_is_not_padded_to_a_recurrent_state() -> None:
    attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=128)
    state = MambaSpec(block_size=16, shapes=((18, 1024),), dtypes=("bfloat16",))
    assert (attention.page_size_bytes, state.page_size_bytes) == (8192, 36864)
    layers: dict[str, KVCacheSpec] = {f"state.{i}": state for i in range(6)}
    layers |= {f"full.{i}": attention for i in range(6)}
    config: dict[str, Any] = {"max_model_len": 32768, "page_alignment_bytes": 1}
    unified = make_plan(layers, PlanConfig(policy="unified", **config), 1 << 34)
    split = make_plan(layers, PlanConfig(policy="split", **config), 1 << 34)
    assert waste_of(unified, 8192).wasted_fraction > 0.7
    assert waste_of(split, 8192).wasted_fraction < 0.02
