"""A scheduler over a real cache manager, and a stand-in for the model: every token follows from its
prefix.
"""

from collections.abc import Callable, Sequence
from math import gcd, lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxkv.cache_manager import KVCacheManager
from jaxkv.connector import KVConnector
from jaxkv.planning.plan import CacheGroup, CachePlan
from jaxkv.request import Request
from jaxkv.scheduling import Scheduler, SchedulerConfig, SchedulerOutput, StepResult
from jaxkv.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    RequestLimits,
    SlidingWindowSpec,
)


def full(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(num_kv_heads=1, head_size=8, block_size=block_size)


def window(size: int, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(num_kv_heads=1, head_size=8, block_size=block_size, sliding_window=size)


def chunked(size: int, block_size: int = 4) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        num_kv_heads=1, head_size=8, block_size=block_size, attention_chunk_size=size
    )


def mamba(block_size: int = 4) -> MambaSpec:
    return MambaSpec(block_size=block_size, shapes=((4,),), dtypes=("float32",))


def make_plan(
    specs: Sequence[KVCacheSpec], num_blocks: int, max_model_len: int, max_in_flight_tokens: int
) -> CachePlan:
    """A plan with one group a spec, in a pool of `num_blocks` ids (the null block included)."""
    sizes = [spec.block_size for spec in specs if spec.prefix_cacheable]
    return CachePlan(
        policy="unified",
        groups=tuple(CacheGroup(layer_names=(f"layer{i}",), spec=spec) for i, spec in enumerate(specs)),
        page_size_bytes=max(spec.page_size_bytes for spec in specs),
        layer_slots=1,
        num_blocks=num_blocks,
        limits=RequestLimits(max_model_len=max_model_len, max_in_flight_tokens=max_in_flight_tokens),
        hash_block_size=gcd(*sizes),
        scheduler_block_size=lcm(*sizes),
    )


def next_token(tokens: NDArray[np.int32]) -> int:
    """The stand-in model: a number from 0 to 96 that depends on the whole prefix."""
    weights = np.arange(1, len(tokens) + 1, dtype=np.int64)
    return int((tokens.astype(np.int64) * weights).sum() % 97)


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What the stand-in model answers to the prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(np.array(tokens, np.int32)))
    return tokens[len(prompt) :]


class Serving:
    """Scheduler and cache of one plan; `step` is one turn of an engine.

    Tokens are computed from a shadow of all sequences when a step is scheduled, and handed over `delay`
    steps later, as a device would.
    """

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        num_blocks: int,
        *,
        max_model_len: int = 64,
        enable_caching: bool = True,
        manager_options: dict[str, Any] | None = None,
        make_connector: Callable[[KVCacheManager], KVConnector] | None = None,
        **config: Any,
    ) -> None:
        self.config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 16, **config})
        in_flight = self.config.max_num_batched_tokens * self.config.batches_in_flight
        self.plan = make_plan(specs, num_blocks, max_model_len, in_flight)
        self.kv = KVCacheManager(
            self.plan,
            enable_caching=enable_caching,
            max_num_seqs=self.config.max_num_seqs,
            **(manager_options or {}),
        )
        connector = None if make_connector is None else make_connector(self.kv)
        self.scheduler = Scheduler(self.plan, self.kv, self.config, connector=connector)
        self.requests: dict[str, Request] = {}
        self._pending: list[tuple[SchedulerOutput, list[int]]] = []
        self._shadow: dict[str, list[int]] = {}

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, **options: Any) -> Request:
        request = Request(request_id, prompt, max_tokens, **options)
        self.scheduler.add_request(request)
        self.requests[request_id] = request
        self._shadow[request_id] = list(prompt)
        return request

    def schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        sampled = []
        for index in output.sampling.tolist():
            tokens = self._shadow[str(output.request_ids[index])]
            upto = int(output.num_computed[index] + output.num_scheduled[index])
            if upto == len(tokens):
                tokens.append(next_token(np.array(tokens, np.int32)))
            sampled.append(tokens[upto])
        self._pending.append((output, sampled))
        return output

    def update(self) -> StepResult:
        output, sampled = self._pending.pop(0)
        return self.scheduler.update_from_output(output, np.array(sampled, np.int32))

    def turn(self, sampled: NDArray[np.int32]) -> tuple[SchedulerOutput, StepResult]:
        """Schedules a step and settles the oldest one with these tokens, whatever the model would say."""
        self._pending.append((self.scheduler.schedule(), []))
        oldest, _ = self._pending.pop(0)
        return oldest, self.scheduler.update_from_output(oldest, sampled)

    def step(self) -> SchedulerOutput:
        """One turn: a step is scheduled; the oldest results come in once as many are in flight as may be."""
        output = self.schedule()
        if len(self._pending) >= self.config.batches_in_flight or not self.scheduler.has_unfinished_requests:
            self.update()
        self.kv.check_integrity()
        return output

    def drain(self) -> None:
        """Takes in all results that are still out."""
        while self._pending:
            self.update()

    def run(self, max_steps: int = 2000) -> list[SchedulerOutput]:
        """Steps until every request has ended."""
        outputs = []
        while self.scheduler.has_unfinished_requests:
            assert len(outputs) < max_steps, f"no end after {max_steps} steps"
            outputs.append(self.step())
        self.drain()
        return outputs
