"""A decode step in which nothing happens to any single request looks at no single request."""

import sys
from collections import Counter
from types import FrameType

import numpy as np
import pytest

from jaxkv.request import Request
from jaxkv.request_table import RequestTable
from tests.scheduling.serving import Serving, full, window


def steady(num_requests: int, *, overlap: bool = False, waiting: bool = False) -> Serving:
    """All requests decode with two blocks in each of 7 groups, some tokens away from their third.

    waiting: another one waits for blocks, of which fewer are free than it needs.
    """
    serving = Serving(
        [full(16), *[window(32, 16)] * 6],
        1 + 7 * (2 * num_requests + 1) if waiting else 1 + 7 * 4 * num_requests,
        max_num_seqs=num_requests + 1,
        max_num_batched_tokens=32 * num_requests,
        max_model_len=64,
        async_scheduling=overlap,
    )
    for i in range(num_requests):
        serving.add(f"r{i}", [i, *range(17)], max_tokens=40)
    if waiting:
        serving.add("waits", [5] * 20, max_tokens=4)
    for _ in range(3):
        serving.step()
    assert serving.scheduler.num_requests_waiting == waiting
    return serving


def count_calls(serving: Serving) -> Counter[str]:
    """Python functions and builtins called in one schedule and one update, by name."""
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[getattr(argument, "__qualname__", str(argument))] += 1

    sampled = np.full(serving.scheduler.num_requests_running, 3, np.int32)
    sys.setprofile(profile)
    try:
        serving.turn(sampled)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("overlap", [False, True], ids=["one_by_one", "overlapping"])
@pytest.mark.parametrize("waiting", [False, True], ids=["", "queue"])
def test_the_number_of_calls_does_not_depend_on_the_number_of_requests(overlap: bool, waiting: bool) -> None:
    few, many = (count_calls(steady(n, overlap=overlap, waiting=waiting)) for n in (4, 64))
    assert few == many


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
