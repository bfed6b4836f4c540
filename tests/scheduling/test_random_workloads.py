"""Random requests, aborts and pools: everybody ends, with the right tokens; nothing is lost, nobody
starves.
"""

from typing import Any

import numpy as np
import pytest

from jaxkv.scheduling import SchedulerOutput
from jaxkv.specs import KVCacheSpec
from tests.scheduling.serving import Serving, chunked, continuation, full, mamba, window

MIXES: dict[str, list[KVCacheSpec]] = {
    "full": [full()],
    "window": [window(6)],
    "full_window": [full(), window(8)],
    "siblings": [full(), window(8), window(8), window(8)],
    "two_windows": [full(), window(3), window(12)],
    "chunked": [full(), chunked(8)],
    "recurrent": [full(), mamba()],
    "unequal_blocks": [full(8), window(6, 4), mamba(4)],
}


class Workload:
    """A random stream of requests, some sharing prefixes, some aborted."""

    def __init__(self, serving: Serving, seed: int, count: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.serving = serving
        self.left = count
        self.aborted: set[str] = set()
        self.ended_at_preemption: dict[str, int] = {}
        self.admitted_at: dict[str, int] = {}
        self.prefixes = [self.rng.integers(0, 90, 24).tolist() for _ in range(3)]

    def maybe_add(self) -> None:
        if self.left == 0 or self.rng.random() > 0.5:
            return
        self.left -= 1
        shared = self.prefixes[self.rng.integers(3)][: int(self.rng.integers(0, 25))]
        own = self.rng.integers(0, 90, int(self.rng.integers(1, 20))).tolist()
        self.serving.add(f"r{self.left}", shared + own, max_tokens=int(self.rng.integers(1, 18)))

    def maybe_abort(self) -> None:
        live = [r for r in self.serving.requests.values() if not r.is_finished]
        if live and self.rng.random() < 0.03:
            name = live[self.rng.integers(len(live))].request_id
            assert self.serving.scheduler.abort(name)
            self.aborted.add(name)

    def num_ended(self) -> int:
        return sum(request.is_finished for request in self.serving.requests.values())

    def check_preemptions(self, output: SchedulerOutput, ended: int) -> None:
        """Between two preemptions of a request another one has ended, or it has run for a block of tokens."""
        for name in output.preempted:
            soon = output.step - self.admitted_at[name] < min(g.block_size for g in self.serving.plan.groups)
            assert not soon or self.ended_at_preemption.get(name, -1) < ended, (
                f"{name} lost its blocks too soon"
            )
            self.ended_at_preemption[name] = ended
        self.admitted_at.update(dict.fromkeys(output.admitted, output.step))

    def run(self) -> None:
        serving, scheduler = self.serving, self.serving.scheduler
        idle = 0
        while self.left or scheduler.has_unfinished_requests:
            self.maybe_add()
            ended = self.num_ended()
            output = serving.step()
            assert output.total_num_scheduled_tokens <= serving.config.max_num_batched_tokens
            assert len(output) <= serving.config.max_num_seqs
            assert not set(output.preempted) & set(output.request_ids.tolist())
            self.check_preemptions(output, ended)
            idle = 0 if len(output) or not scheduler.has_unfinished_requests else idle + 1
            assert idle <= serving.config.batches_in_flight, "nothing runs although requests wait"
            self.maybe_abort()
        serving.drain()
        for name, request in serving.requests.items():
            answer = request.output_token_ids.tolist()
            assert answer == continuation(request.prompt_token_ids.tolist(), len(answer))
            if name not in self.aborted:
                assert request.finish_reason == "length"
                assert len(answer) == request.max_tokens
        serving.kv.check_integrity()
        assert serving.kv.num_free_blocks == serving.plan.usable_blocks


@pytest.mark.parametrize("overlap", [False, True], ids=["one_by_one", "overlapping"])
@pytest.mark.parametrize("mix", list(MIXES))
def test_every_request_ends_with_its_tokens(mix: str, overlap: bool) -> None:
    for seed in range(6):
        in_flight = 2 * 16 if overlap else 16
        specs = MIXES[mix]
        # From a pool that holds one request of the longest kind to one that is rarely short.
        limits = Serving(specs, 1000, max_num_batched_tokens=16, async_scheduling=overlap).plan.limits
        assert limits.max_in_flight_tokens == in_flight
        largest = sum(spec.admission_blocks(24 + 19 + 17, limits) for spec in specs)
        serving = Serving(
            specs,
            1 + int(largest * (1 + 0.4 * seed)),
            max_num_batched_tokens=16,
            max_num_seqs=6,
            long_prefill_token_threshold=(0, 5)[seed % 2],
            watermark=(0.0, 0.1)[seed // 3],
            enable_caching=seed != 2,
            async_scheduling=overlap,
        )
        Workload(serving, seed, 40).run()


def test_what_a_plan_promises_an_empty_engine_runs() -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        block = int(rng.choice([2, 4, 8]))
        sizes = rng.integers(1, 20, 2).tolist()
        specs = [full(block), window(sizes[0], block), chunked(sizes[1], block)]
        specs = [spec for spec in specs if rng.random() < 0.7] or specs[:1]
        budget = int(rng.integers(2, 24))
        length = int(rng.integers(4, 60))
        options: dict[str, Any] = {
            "max_num_batched_tokens": budget,
            "max_num_seqs": 2,
            "max_model_len": length,
        }
        limits = Serving(specs, 1000, **options).plan.limits
        largest = sum(spec.max_blocks_per_request(limits) for spec in specs)
        serving = Serving(specs, 1 + largest, **options)
        serving.add("a", rng.integers(0, 90, length - 1).tolist(), max_tokens=1)
        serving.add("b", rng.integers(0, 90, 1).tolist(), max_tokens=length)
        serving.run()
        assert serving.requests["a"].num_preemptions == 0
        assert serving.requests["b"].num_output_tokens == length - 1
