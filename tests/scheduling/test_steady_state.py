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
    """All requests decode, some tokens away from a block boundary, in 7 groups."""
    serving = Serving(
        [full(16), *[window(32, 16)] * 6],
        1 + num_requests * 7 * 4,
        max_num_seqs=num_requests,
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
    return serving


def count_calls(serving: Serving) -> Counter[str]:
    """Python functions entered, and builtins that numpy or dicts run, in one schedule and one update."""
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[getattr(argument, "__qualname__", str(argument))] += 1

    scheduler = serving.scheduler
    sampled = np.full(scheduler.num_requests_running, 3, np.int32)
    sys.setprofile(profile)
    try:
        output = scheduler.schedule()
        scheduler.update_from_output(output if not serving.config.async_scheduling else OLDEST[0], sampled)
    finally:
        sys.setprofile(None)
    return calls


OLDEST: list = []


@pytest.mark.parametrize("overlap", [False, True], ids=["one_by_one", "overlapping"])
@pytest.mark.parametrize("waiting", [False, True], ids=["", "queue"])
def test_the_number_of_calls_does_not_depend_on_the_number_of_requests(overlap: bool, waiting: bool) -> None:
    counts = []
    for num_requests in (4, 64):
        serving = steady(num_requests, overlap=overlap, waiting=waiting)
        OLDEST[:] = [serving._pending[0][0]] if overlap else []
        counts.append(count_calls(serving))
    assert counts[0] == counts[1]


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
        output = serving.scheduler.schedule()
        assert len(output) == 64
        assert len(serving.scheduler.update_from_output(output, sampled)) == 64
