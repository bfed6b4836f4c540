"""The same requests through vLLM's own files, one after the other. Import after `import_vllm`."""
# pyright: reportMissingImports=false

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from bench_host.side import Limits
from bench_host.vllm_side import _engine_config
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from jaxkv import specs
from jaxkv.errors import JaxkvError
from jaxkv.hashing import make_hasher
from jaxkv.lab.content import HashCache
from jaxkv.lab.trace import Trace
from jaxkv.planning.plan import CachePlan

_RETENTION_INTERVAL = 0
"""vLLM's default: sparse."""


class VllmReplay(NamedTuple):
    """hits: by request, tokens. seconds: of processor time, the hashes' making left out."""

    hits: list[int]
    seconds: float


def _spec(spec: specs.KVCacheSpec) -> KVCacheSpec:
    if isinstance(spec, specs.MambaSpec):
        return MambaSpec(
            block_size=spec.block_size,
            shapes=((spec.page_size_bytes // 4,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )
    if not isinstance(spec, specs.FullAttentionSpec | specs.SlidingWindowSpec):
        raise JaxkvError(f"groups of kind {spec.kind!r} are not replayed through vLLM")
    heads = {"num_kv_heads": spec.num_kv_heads, "head_size": spec.head_size, "dtype": torch.bfloat16}
    if isinstance(spec, specs.SlidingWindowSpec):
        return SlidingWindowSpec(block_size=spec.block_size, sliding_window=spec.sliding_window, **heads)
    return FullAttentionSpec(block_size=spec.block_size, **heads)


def _config(plan: CachePlan) -> KVCacheConfig:
    if any(group.blocks_per_state > 1 for group in plan.groups):
        raise JaxkvError("vLLM has no states that are spread over blocks: use --policy unified")
    groups = [
        KVCacheGroupSpec([f"layer.{index}"], _spec(group.spec)) for index, group in enumerate(plan.groups)
    ]
    return KVCacheConfig(
        num_blocks=plan.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=_RETENTION_INTERVAL,
        hash_block_size=plan.hash_block_size,
        cache_hit_alignment_tokens=plan.scheduler_block_size,
    )


class _Requests:
    """vLLM's requests of a trace, whose hashes are those that jaxkv replays with."""

    def __init__(self, trace: Trace, plan: CachePlan) -> None:
        self._trace = trace
        self._hasher = make_hasher("sha256", plan.hash_block_size)
        self._cache = HashCache(plan.hash_block_size)

    def make(self, serial: int) -> Request:
        traced = self._trace.requests[serial]
        total = traced.num_prompt_tokens + traced.num_output_tokens
        size = self._hasher.hash_block_size
        hashes = traced.content.hashes(self._hasher, self._cache, serial, total // size)

        def new_hashes(request: Request) -> list[Any]:
            return hashes[len(request.block_hashes) : request.num_tokens // size]

        return Request(
            str(serial),
            [0] * traced.num_prompt_tokens,
            SamplingParams(max_tokens=traced.num_output_tokens, ignore_eos=True),
            None,
            block_hasher=new_hashes,
        )


class _Engine(Protocol):
    def serve(self, request: Request) -> int:
        """Serves the request from its first step to its last; returns its hit in tokens."""
        ...


def _replay(trace: Trace, plan: CachePlan, engine: _Engine) -> VllmReplay:
    """Each request after the one before it has ended."""
    requests = _Requests(trace, plan)
    hits: list[int] = []
    seconds = 0.0
    for serial in range(len(trace.requests)):
        request = requests.make(serial)
        start = time.process_time()
        hits.append(engine.serve(request))
        seconds += time.process_time() - start
    return VllmReplay(hits, seconds)


def through_manager(trace: Trace, plan: CachePlan, num_batched_tokens: int) -> VllmReplay:
    """Calls vLLM's KVCacheManager as its scheduler would for one request at a time.
    Not for recurrent layers, whose chunks only the scheduler can cut.
    """
    if any(isinstance(group.spec, specs.MambaSpec) for group in plan.groups):
        raise JaxkvError("vLLM's manager alone does not cut the chunks of recurrent layers")
    return _replay(trace, plan, _ManagerAlone(plan, num_batched_tokens))


def through_scheduler(trace: Trace, plan: CachePlan, num_batched_tokens: int) -> VllmReplay:
    """Serves the requests with vLLM's Scheduler, one at a time."""
    return _replay(trace, plan, _WithScheduler(plan, num_batched_tokens))


class _ManagerAlone:
    def __init__(self, plan: CachePlan, num_batched_tokens: int) -> None:
        self._num_batched_tokens = num_batched_tokens
        self._manager = KVCacheManager(
            _config(plan),
            max_model_len=plan.max_model_len,
            scheduler_block_size=plan.scheduler_block_size,
            hash_block_size=plan.hash_block_size,
            max_in_flight_tokens=plan.max_in_flight_tokens,
        )

    def serve(self, request: Request) -> int:
        manager = self._manager
        blocks, hit, boundary = manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        request.num_computed_tokens = 0
        first: tuple[Any, ...] = (hit, blocks)
        while request.num_computed_tokens < request.num_prompt_tokens:
            done = hit if first else request.num_computed_tokens
            size = min(self._num_batched_tokens, request.num_prompt_tokens - done)
            if manager.allocate_slots(request, size, *first) is None:
                raise JaxkvError(f"vLLM's pool is too small for request {request.request_id}")
            first = ()
            request.num_computed_tokens = done + size
            manager.new_step_starts()
        for _ in range(request.max_tokens - 1):
            request.append_output_token_ids(0)
            if manager.allocate_slots(request, 1) is None:
                raise JaxkvError(f"vLLM's pool is too small for request {request.request_id}")
            request.num_computed_tokens += 1
            manager.new_step_starts()
        manager.free(request)
        return hit


class _WithScheduler:
    def __init__(self, plan: CachePlan, num_batched_tokens: int) -> None:
        limits = Limits(
            num_blocks=plan.num_blocks,
            max_model_len=plan.max_model_len,
            max_num_batched_tokens=num_batched_tokens,
            max_num_seqs=1,
        )
        self._scheduler = Scheduler(
            _engine_config(_Sized(plan.scheduler_block_size), limits),  # pyright: ignore[reportArgumentType]
            _config(plan),
            _Grammar(),
            block_size=plan.scheduler_block_size,
            hash_block_size=plan.hash_block_size,
        )

    def serve(self, request: Request) -> int:
        scheduler = self._scheduler
        scheduler.add_request(request)
        hits: list[int] = []
        while scheduler.requests:
            step = scheduler.schedule()
            hits += [new.num_computed_tokens for new in step.scheduled_new_reqs]
            names: Sequence[str] = list(step.num_scheduled_tokens)
            known = request.num_computed_tokens >= request.num_tokens
            output = ModelRunnerOutput(
                req_ids=list(names),
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[[0] if known else [] for _ in names],
            )
            scheduler.update_from_output(step, output)
        return hits[0]


class _Sized(NamedTuple):
    block_size: int


class _Grammar:
    """Without structured output the scheduler asks only whether tokens are acceptable."""

    accept_tokens: Callable[[Any, Any], bool] = staticmethod(lambda request, tokens: True)
