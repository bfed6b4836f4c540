"""vLLM as a side of the benchmark, through its public classes. Import after `vllm_import.import_vllm`."""
# pyright: reportMissingImports=false

from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
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

from .layouts import HEAD_SIZE, NUM_KV_HEADS, Layer, Layout
from .side import CalledAlike, Limits, PoolTooSmallError, Tokens

# vLLM's defaults: sha256 over pickled tuples, sparse retention of window and recurrent checkpoints.
_HASH = get_hash_fn_by_name("sha256")
_RETENTION_INTERVAL = 0

init_none_hash(_HASH)


def _spec(layer: Layer) -> KVCacheSpec:
    heads = {"num_kv_heads": NUM_KV_HEADS, "head_size": HEAD_SIZE, "dtype": torch.bfloat16}
    if layer.kind == "full":
        return FullAttentionSpec(block_size=layer.block_size, **heads)
    if layer.kind == "sliding_window":
        return SlidingWindowSpec(block_size=layer.block_size, sliding_window=layer.sliding_window, **heads)
    return MambaSpec(
        block_size=layer.block_size,
        shapes=((layer.page_size_bytes // 4,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )


def _cache_config(layout: Layout, num_blocks: int) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{i}"], _spec(layer)) for i, layer in enumerate(layout.groups)]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=_RETENTION_INTERVAL,
        hash_block_size=layout.block_size,
        cache_hit_alignment_tokens=layout.block_size,
    )


def _request(name: str, tokens: list[int], max_tokens: int, block_size: int) -> Request:
    return Request(
        name,
        tokens,
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        None,
        block_hasher=get_request_block_hasher(block_size, _HASH),
    )


class _DecodeBatch:
    def __init__(self, manager: KVCacheManager, requests: list[Request]) -> None:
        self._manager = manager
        self._requests = requests
        for request in requests:
            request.append_output_token_ids(7)

    def allocate(self) -> None:
        allocate_slots = self._manager.allocate_slots
        for request in self._requests:
            if allocate_slots(request, 1) is None:
                raise PoolTooSmallError(f"no room for a decode step of {request.request_id}")

    def settle(self) -> None:
        self._manager.new_step_starts()
        for request in self._requests:
            request.num_computed_tokens += 1
            request.append_output_token_ids(7)


class _Manager(CalledAlike):
    def __init__(self, layout: Layout, limits: Limits) -> None:
        self._block_size = layout.block_size
        self._manager = KVCacheManager(
            _cache_config(layout, limits.num_blocks),
            max_model_len=limits.max_model_len,
            scheduler_block_size=layout.block_size,
            hash_block_size=layout.block_size,
            max_in_flight_tokens=limits.max_num_batched_tokens,
        )

    def new_request(self, name: str, tokens: Tokens) -> Request:
        return _request(name, tokens.tolist(), 4096, self._block_size)

    def look_up(self, request: Request) -> int:
        return self._manager.get_computed_blocks(request)[1]

    def admit(self, request: Request, num_tokens: int) -> None:
        blocks, hit, boundary = self._manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        if (
            self._manager.allocate_slots(request, num_tokens, hit, blocks, full_sequence_must_fit=True)
            is None
        ):
            raise PoolTooSmallError(f"no room to admit {request.request_id}")
        request.num_computed_tokens = hit

    def decode_batch(self, requests: list[Request]) -> _DecodeBatch:
        return _DecodeBatch(self._manager, requests)


def _engine_config(layout: Layout, limits: Limits) -> Any:
    """The settings that the scheduler reads, at vLLM's defaults for a plain decoder-only model on one
    device."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_seqs=limits.max_num_seqs,
            max_num_active_seqs=None,
            max_num_scheduled_tokens=None,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            long_prefill_token_threshold=0,
            long_prefill_token_threshold_adaptive=False,
            policy="fcfs",
            watermark=0.0,
            prefill_schedule_interval=1,
            scheduler_reserve_full_isl=True,
            enable_chunked_prefill=True,
            async_scheduling=False,
            disable_chunked_mm_input=False,
        ),
        cache_config=SimpleNamespace(
            block_size=layout.block_size,
            num_gpu_blocks=limits.num_blocks,
            enable_prefix_caching=True,
            mamba_cache_mode="align",
            enable_mamba_shared_prefix_checkpoint=False,
        ),
        model_config=SimpleNamespace(
            max_model_len=limits.max_model_len,
            runner_type="generate",
            is_diffusion=False,
            is_encoder_decoder=False,
            return_sampling_mask=False,
            supports_multimodal_inputs=False,
            uses_mrope=False,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
        ),
        observability_config=SimpleNamespace(
            per_request_spec_decode_metrics="none", kv_cache_metrics=False, enable_mfu_metrics=False
        ),
        aux_output_config=SimpleNamespace(enabled=False),
        ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        ec_transfer_config=None,
        kv_events_config=None,
        kv_transfer_config=None,
        lora_config=None,
        speculative_config=None,
        is_mm_encoder_only=False,
        max_concurrent_batches=1,
        max_in_flight_tokens=limits.max_num_batched_tokens,
        num_hash_lookahead_tokens=0,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
        num_speculative_tokens=0,
        use_v2_model_runner=False,
    )


class _Scheduler:
    def __init__(self, layout: Layout, limits: Limits) -> None:
        self._block_size = layout.block_size
        # Without structured output the scheduler asks its manager only whether tokens are acceptable.
        grammar = SimpleNamespace(accept_tokens=lambda request, tokens: True)
        self._scheduler = Scheduler(
            _engine_config(layout, limits),
            _cache_config(layout, limits.num_blocks),
            grammar,
            block_size=layout.block_size,
            hash_block_size=layout.block_size,
        )
        self._step: Any = None
        self._output: Any = None

    def add(self, name: str, tokens: Tokens, max_tokens: int) -> None:
        self._scheduler.add_request(_request(name, tokens.tolist(), max_tokens, self._block_size))

    def schedule(self) -> int:
        self._step = self._scheduler.schedule()
        return self._step.total_num_scheduled_tokens

    def sample(self) -> None:
        names = list(self._step.num_scheduled_tokens)
        requests = self._scheduler.requests
        sampled = [
            [7] if requests[name].num_computed_tokens >= requests[name].num_tokens else [] for name in names
        ]
        self._output = ModelRunnerOutput(
            req_ids=names, req_id_to_index={n: i for i, n in enumerate(names)}, sampled_token_ids=sampled
        )

    def update(self) -> None:
        self._scheduler.update_from_output(self._step, self._output)

    @property
    def num_unfinished(self) -> int:
        return len(self._scheduler.requests)


class _Hashing:
    def __init__(self, tokens: Tokens, block_size: int) -> None:
        self._hasher = get_request_block_hasher(block_size, _HASH)
        self._request = Request(
            "hashed", tokens.tolist(), SamplingParams(max_tokens=1), None, block_hasher=lambda request: []
        )

    def hash_all(self) -> None:
        self._hasher(self._request)


class VllmSide:
    name = "vllm"

    def manager(self, layout: Layout, limits: Limits) -> _Manager:
        return _Manager(layout, limits)

    def scheduler(self, layout: Layout, limits: Limits) -> _Scheduler:
        return _Scheduler(layout, limits)

    def hashing(self, tokens: Tokens, block_size: int) -> _Hashing:
        return _Hashing(tokens, block_size)
