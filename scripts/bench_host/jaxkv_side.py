"""jaxkv as a side of the benchmark."""

import numpy as np

from jaxkv.cache_manager import KVCacheManager
from jaxkv.hashing import make_hasher
from jaxkv.planning.plan import CacheGroup, CachePlan
from jaxkv.request import Request
from jaxkv.scheduling import Scheduler, SchedulerConfig, SchedulerOutput
from jaxkv.specs import FullAttentionSpec, KVCacheSpec, MambaSpec, RequestLimits, SlidingWindowSpec

from .layouts import HEAD_SIZE, NUM_KV_HEADS, Layer, Layout
from .side import CalledAlike, Limits, PoolTooSmallError, Tokens


def _spec(layer: Layer) -> KVCacheSpec:
    if layer.kind == "full":
        return FullAttentionSpec(block_size=layer.block_size, num_kv_heads=NUM_KV_HEADS, head_size=HEAD_SIZE)
    if layer.kind == "sliding_window":
        return SlidingWindowSpec(
            block_size=layer.block_size,
            num_kv_heads=NUM_KV_HEADS,
            head_size=HEAD_SIZE,
            sliding_window=layer.sliding_window,
        )
    return MambaSpec(
        block_size=layer.block_size, shapes=((layer.page_size_bytes // 4,),), dtypes=("float32",)
    )


def _plan(layout: Layout, limits: Limits) -> CachePlan:
    return CachePlan(
        policy="unified",
        groups=tuple(
            CacheGroup(layer_names=(f"layer.{i}",), spec=_spec(layer))
            for i, layer in enumerate(layout.groups)
        ),
        page_size_bytes=layout.groups[0].page_size_bytes,
        layer_slots=1,
        num_blocks=limits.num_blocks,
        limits=RequestLimits(
            max_model_len=limits.max_model_len, max_in_flight_tokens=limits.max_num_batched_tokens
        ),
        hash_block_size=layout.block_size,
        scheduler_block_size=layout.block_size,
    )


def _cache(plan: CachePlan, limits: Limits, eviction: str) -> KVCacheManager:
    return KVCacheManager(plan, max_num_seqs=limits.max_num_seqs, eviction=eviction)


class _DecodeBatch:
    def __init__(self, manager: KVCacheManager, requests: list[Request]) -> None:
        self._manager = manager
        self._requests = requests
        self._rows = np.array([manager.row_of(request.request_id) for request in requests], np.int32)
        for request in requests:
            request.append_tokens(_SAMPLED)
        self._after = np.array([request.num_computed_tokens + 1 for request in requests], np.int64)

    def allocate(self) -> None:
        if self._manager.allocate_decodes(self._rows, self._after).num_done < len(self._rows):
            raise PoolTooSmallError("no room for a decode step of jaxkv")

    def settle(self) -> None:
        self._manager.new_step_starts()
        for request in self._requests:
            request.num_computed_tokens += 1
            request.append_tokens(_SAMPLED)
            request.block_hashes(self._manager.hasher)
        self._after += 1


_SAMPLED = np.array([7], np.int32)


class _Manager(CalledAlike):
    def __init__(self, layout: Layout, limits: Limits, eviction: str) -> None:
        self._manager = _cache(_plan(layout, limits), limits, eviction)

    def new_request(self, name: str, tokens: Tokens) -> Request:
        request = Request(name, tokens)
        request.block_hashes(self._manager.hasher)
        return request

    def look_up(self, request: Request) -> int:
        return self._manager.get_computed_blocks(request).num_tokens

    def admit(self, request: Request, num_tokens: int) -> None:
        hit = self._manager.get_computed_blocks(request)
        if self._manager.allocate_slots(request, num_tokens, hit=hit) is None:
            raise PoolTooSmallError(f"no room to admit {request.request_id}")
        request.num_computed_tokens = hit.num_tokens

    def decode_batch(self, requests: list[Request]) -> _DecodeBatch:
        return _DecodeBatch(self._manager, requests)


class _Scheduler:
    def __init__(self, layout: Layout, limits: Limits, eviction: str) -> None:
        plan = _plan(layout, limits)
        manager = _cache(plan, limits, eviction)
        config = SchedulerConfig(
            max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens
        )
        self._hasher = manager.hasher
        self._scheduler = Scheduler(plan, manager, config)
        self._output: SchedulerOutput | None = None
        self._sampled = _SAMPLED

    def add(self, name: str, tokens: Tokens, max_tokens: int) -> None:
        request = Request(name, tokens, max_tokens)
        request.block_hashes(self._hasher)
        self._scheduler.add_request(request)

    def schedule(self) -> int:
        self._output = self._scheduler.schedule()
        return self._output.total_num_scheduled_tokens

    def sample(self) -> None:
        assert self._output is not None
        self._sampled = np.full(len(self._output.sampling), 7, np.int32)

    def update(self) -> None:
        assert self._output is not None
        self._scheduler.update_from_output(self._output, self._sampled)

    @property
    def num_unfinished(self) -> int:
        return self._scheduler.num_requests_running + self._scheduler.num_requests_waiting


class _Hashing:
    def __init__(self, tokens: Tokens, block_size: int) -> None:
        self._hasher = make_hasher("sha256", block_size)
        self._request = Request("hashed", tokens)

    def hash_all(self) -> None:
        self._request.block_hashes(self._hasher)


class JaxkvSide:
    """`eviction`: name of the policy that all its managers have."""

    name = "jaxkv"

    def __init__(self, eviction: str) -> None:
        self._eviction = eviction

    def manager(self, layout: Layout, limits: Limits) -> _Manager:
        return _Manager(layout, limits, self._eviction)

    def scheduler(self, layout: Layout, limits: Limits) -> _Scheduler:
        return _Scheduler(layout, limits, self._eviction)

    def hashing(self, tokens: Tokens, block_size: int) -> _Hashing:
        return _Hashing(tokens, block_size)
