"""Small caches and requests for the tests of the core."""

from collections.abc import Iterable, Sequence
from math import gcd, lcm
from typing import Any

from jaxkv.cache_manager import KVCacheManager
from jaxkv.hits import PrefixHit
from jaxkv.planning.plan import CacheGroup, CachePlan
from jaxkv.request import Request
from jaxkv.slot_allocation import Allocation
from jaxkv.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    RequestLimits,
    SlidingWindowSpec,
)


def full(block_size: int = 4, **fields: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, **fields)


def window(sliding_window: int, block_size: int = 4, **fields: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, sliding_window=sliding_window, **fields
    )


def local(chunk: int, block_size: int = 4) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, attention_chunk_size=chunk
    )


def mamba(block_size: int = 4, **fields: Any) -> MambaSpec:
    return MambaSpec(block_size=block_size, shapes=((4,),), dtypes=("float32",), **fields)


def make_plan(
    specs: Sequence[KVCacheSpec],
    num_blocks: int = 100,
    *,
    hash_block_size: int | None = None,
    eagle: Iterable[int] = (),
    blocks_per_state: int = 1,
    max_model_len: int = 1000,
    max_in_flight_tokens: int = 64,
    **limits: int,
) -> CachePlan:
    """One group a spec. blocks_per_state: of recurrent groups. eagle: indices of EAGLE groups."""
    eagle = set(eagle)
    sizes = [spec.block_size for spec in specs if spec.prefix_cacheable] or [1]
    return CachePlan(
        policy="unified",
        groups=tuple(
            CacheGroup(
                layer_names=(f"layer{i}",),
                spec=spec,
                is_eagle_group=i in eagle,
                blocks_per_state=blocks_per_state if isinstance(spec, MambaSpec) else 1,
            )
            for i, spec in enumerate(specs)
        ),
        page_size_bytes=4096,
        layer_slots=1,
        num_blocks=num_blocks,
        limits=RequestLimits(
            max_model_len=max_model_len, max_in_flight_tokens=max_in_flight_tokens, **limits
        ),
        hash_block_size=hash_block_size or gcd(*sizes),
        scheduler_block_size=lcm(*sizes),
    )


def make_cache(
    specs: Sequence[KVCacheSpec], num_blocks: int = 100, *, options: dict[str, Any] | None = None, **plan: Any
) -> KVCacheManager:
    """A cache of one group a spec. options: of the KVCacheManager."""
    return KVCacheManager(make_plan(specs, num_blocks, **plan), max_num_seqs=2, **(options or {}))


class Driver:
    """Serves requests from one cache, one call a step unless told otherwise."""

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache
        self._count = 0

    def request(self, tokens: Sequence[int], **fields: Any) -> Request:
        self._count += 1
        return Request(f"r{self._count}", list(tokens), **fields)

    def look_up(self, tokens: Sequence[int]) -> PrefixHit:
        return self.cache.get_computed_blocks(self.request(tokens))

    def hit(self, tokens: Sequence[int]) -> int:
        return self.look_up(tokens).num_tokens

    def prefill(self, request: Request, chunk: int = 1000, *, new_steps: bool = True) -> Request:
        """Computes all known tokens, in chunks that end where states are to be kept."""
        hit: PrefixHit | None = None
        if self.cache.rows.find(request.request_id) < 0:
            hit = self.cache.get_computed_blocks(request)
            request.num_computed_tokens = hit.num_tokens
        while request.num_computed_tokens < request.num_tokens:
            if new_steps:
                self.cache.new_step_starts()
            start = request.num_computed_tokens
            end = min(start + chunk, request.num_tokens)
            stops = [p for p in self.cache.checkpoint_positions(request, hit) if start < p < end]
            end = min([end, *stops])
            allocation = self.cache.allocate_slots(request, end - start, hit=hit)
            assert allocation is not None, f"no room for {request.request_id}"
            request.num_computed_tokens, hit = end, None
            self.cache.take_block_copies()
            self.cache.check_integrity()
        if new_steps:
            self.cache.new_step_starts()
        return request

    def run(self, tokens: Sequence[int], chunk: int = 1000, **fields: Any) -> Request:
        """A new request with all its tokens computed."""
        return self.prefill(self.request(tokens, **fields), chunk)

    def serve(self, tokens: Sequence[int], chunk: int = 1000, **fields: Any) -> None:
        """A request that comes, is computed and ends."""
        self.cache.free(self.run(tokens, chunk, **fields))
        self.cache.check_integrity()

    def decode(self, request: Request, tokens: Sequence[int]) -> None:
        """Appends the tokens and computes them, one a step."""
        for token in tokens:
            request.append_tokens([token])
            self.cache.new_step_starts()
            assert self.cache.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        self.cache.new_step_starts()

    def step(self, request: Request, num_tokens: int) -> Allocation | None:
        self.cache.new_step_starts()
        allocation = self.cache.allocate_slots(request, num_tokens)
        if allocation is not None:
            request.num_computed_tokens += num_tokens
        return allocation


def seq(start: int, length: int) -> list[int]:
    """`length` tokens that no sequence with another start shares."""
    return list(range(start * 10_000, start * 10_000 + length))


def snapshot(cache: KVCacheManager) -> dict[str, Any]:
    """Everything a call could change, but the pool's order of plain ids only as far as it is in use."""
    pool = cache.pool
    return {
        "refs": pool.refs.tolist(),
        "cached": pool.cached_by.tolist(),
        "strong": pool.strong.tolist(),
        "hashes": list(pool.hash_of),
        "free": pool.num_free,
        "plain": pool.plain_ids().tolist(),
        "queue": pool.free_units().tolist(),
        "rows": sorted(cache.rows.active().tolist()),
        "position": cache.rows.position.tolist(),
        "units": [
            [manager.units_of(row).tolist() for row in cache.rows.active().tolist()]
            for manager in cache.managers
        ],
        "index": [dict(manager.index.units) for manager in cache.managers],
        "stats": dict(cache.prefix_cache_stats.counters()),
    }


def take_away(cache: KVCacheManager, num_blocks: int) -> None:
    """Makes the pool give out `num_blocks` ids and throws away what they held: eviction, on demand."""
    ids = cache.pool.take(0, num_blocks)
    cache.pool.let_go(ids[0])
