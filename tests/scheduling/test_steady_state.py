"""A decode step in which nothing happens to any single request looks at no single request."""

import gc
import sys
from collections import Counter
from threading import get_ident
from types import CodeType

import numpy as np
import pytest
from numpy.typing import NDArray

from jaxkv.request import Request
from jaxkv.request_table import RequestTable
from jaxkv.scheduling import Scheduler, SchedulerOutput, StepResult
from jaxkv.specs import CrossAttentionSpec, KVCacheSpec, MLASpec, ScratchSpec, SlidingWindowMLASpec
from tests.scheduling.serving import Serving, chunked, full, mamba, window

GEMMA = [full(16), *[window(32, 16)] * 6]

OTHERS: dict[str, list[KVCacheSpec]] = {
    "chunked": [full(16), chunked(32, 16)],
    "recurrent": [full(16), mamba(16), mamba(16)],
    "latent": [
        MLASpec(block_size=16, head_size=8),
        SlidingWindowMLASpec(block_size=16, head_size=8, sliding_window=20),
    ],
    "private": [
        full(16),
        ScratchSpec(block_size=16, num_kv_heads=1, head_size=8),
        CrossAttentionSpec(block_size=16, num_kv_heads=1, head_size=8),
    ],
    "unequal_blocks": [full(32), window(40, 16), mamba(16)],
}


def steady(
    num_requests: int,
    specs: list[KVCacheSpec] = GEMMA,
    *,
    overlap: bool = False,
    waiting: bool = False,
    drafts: int = 0,
) -> Serving:
    """All requests decode with two blocks of 16 in each group, some tokens away from their third.

    waiting: another one waits for blocks, of which fewer are free than it needs.
    """
    serving = Serving(
        specs,
        1 + 7 * (2 * num_requests + 1) if waiting else 1 + 7 * 4 * num_requests,
        max_num_seqs=num_requests + 1,
        max_num_batched_tokens=32 * num_requests,
        max_model_len=64,
        async_scheduling=overlap,
        num_speculative_tokens=drafts,
    )
    for i in range(num_requests):
        serving.add(f"r{i}", [i, *range(17)], max_tokens=40)
    if waiting:
        serving.add("waits", [5] * 20, max_tokens=4)
    for _ in range(3):
        serving.step()
    assert serving.scheduler.num_requests_waiting == waiting
    return serving


def count_instructions(serving: Serving, num_steps: int = 1) -> Counter[str]:
    """Bytecodes that these steps and their updates run, by function: a loop over requests shows, whatever it
    does with them.

    Only of this thread, and without the garbage collector: other packages' callbacks run when it does.
    """
    counts: Counter[str] = Counter()
    this_thread = get_ident()

    def count(code: CodeType, offset: int) -> None:
        if get_ident() == this_thread:
            counts[code.co_qualname] += 1

    sampled = np.full(serving.scheduler.num_requests_running, 3, np.int32)
    monitoring, tool = sys.monitoring, sys.monitoring.PROFILER_ID
    collects = gc.isenabled()
    gc.disable()
    monitoring.use_tool_id(tool, "steady steps")
    monitoring.register_callback(tool, monitoring.events.INSTRUCTION, count)
    monitoring.set_events(tool, monitoring.events.INSTRUCTION)
    try:
        for _ in range(num_steps):
            serving.turn(sampled)
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
        if collects:
            gc.enable()
    return counts


@pytest.mark.parametrize("overlap", [False, True], ids=["one_by_one", "overlapping"])
@pytest.mark.parametrize("waiting", [False, True], ids=["", "queue"])
def test_what_is_run_does_not_depend_on_the_number_of_requests(overlap: bool, waiting: bool) -> None:
    few, many = (count_instructions(steady(n, overlap=overlap, waiting=waiting)) for n in (4, 64))
    assert few == many


@pytest.mark.parametrize("overlap", [False, True], ids=["one_by_one", "overlapping"])
@pytest.mark.parametrize("kinds", list(OTHERS))
def test_nor_does_it_with_layers_of_any_kind(kinds: str, overlap: bool) -> None:
    few, many = (count_instructions(steady(n, OTHERS[kinds], overlap=overlap), 6) for n in (4, 64))
    assert few == many
    assert few


def test_nor_where_a_draft_model_proposes_nothing() -> None:
    few, many = (count_instructions(steady(n, drafts=3)) for n in (4, 64))
    assert few == many


def test_a_loop_over_requests_would_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler.update_from_output

    def slow(scheduler: Scheduler, output: SchedulerOutput, sampled: NDArray[np.int32]) -> StepResult:
        num_tokens = scheduler.table.num_tokens
        for row in output.rows:
            num_tokens[row] += 0
        return original(scheduler, output, sampled)

    monkeypatch.setattr(Scheduler, "update_from_output", slow)
    few, many = (count_instructions(steady(n)) for n in (4, 64))
    assert {name for name in many if many[name] != few[name]} == {slow.__qualname__}


def test_no_request_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = steady(64)

    def touched(*args: object) -> None:
        raise AssertionError("a single request was looked at")

    for name in ("num_tokens", "num_computed_tokens", "row", "is_finished"):
        monkeypatch.setattr(Request, name, property(touched))
    for name in ("token_ids", "block_hashes", "append_tokens"):
        monkeypatch.setattr(Request, name, touched)
    monkeypatch.setattr(RequestTable, "request", touched)
    sampled = np.full(64, 3, np.int32)
    for _ in range(8):
        output, result = serving.turn(sampled)
        assert len(output) == len(result) == 64
