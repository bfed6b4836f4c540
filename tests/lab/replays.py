"""Small plans and traces for tests of the laboratory."""

from collections.abc import Sequence

from jaxkv.lab.content import PrefixIds, runs_of
from jaxkv.lab.trace import Trace, TraceRequest
from jaxkv.planning.plan import CacheGroup, CachePlan
from jaxkv.specs import FullAttentionSpec, KVCacheSpec, MambaSpec, RequestLimits, SlidingWindowSpec

BLOCK = 4


def full(block_size: int = BLOCK) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype="bfloat16")


def window(size: int = 8, block_size: int = BLOCK) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=64, dtype="bfloat16", sliding_window=size
    )


def state(block_size: int = BLOCK) -> MambaSpec:
    return MambaSpec(block_size=block_size, shapes=((8, 16),), dtypes=("float32",))


def plan_of(
    specs: Sequence[KVCacheSpec],
    num_blocks: int = 2000,
    *,
    block_size: int = BLOCK,
    max_model_len: int = 100_000,
    in_flight: int = 64,
) -> CachePlan:
    groups = tuple(
        CacheGroup(layer_names=(f"layers.{index}",), spec=spec) for index, spec in enumerate(specs)
    )
    return CachePlan(
        policy="by hand",
        groups=groups,
        page_size_bytes=4096,
        layer_slots=1,
        num_blocks=num_blocks,
        limits=RequestLimits(max_model_len=max_model_len, max_in_flight_tokens=in_flight),
        hash_block_size=block_size,
        scheduler_block_size=block_size,
    )


def trace_of(
    *prompts: tuple[int, Sequence[int]], unit: int = BLOCK, answer: int = 1, gap: float = 1.0
) -> Trace:
    """Prompts of so many tokens with these ids, `gap` seconds apart."""
    requests = [
        TraceRequest(f"request {index}", index * gap, length, answer, PrefixIds(unit, length, runs_of(ids)))
        for index, (length, ids) in enumerate(prompts)
    ]
    return Trace("by hand", "mooncake", requests, unit)
