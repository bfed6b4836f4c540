"""Admission that reserves: a request is let in only if its whole prompt, and those still being read, find
blocks.

What a running prompt may still take is worked out from the blocks it holds at that moment, so gate and step
cannot drift apart. The figures are the bounds of the specs, exact for a request alone in the engine: what a
plan promises, an empty engine admits.
"""

from bisect import bisect_right
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jaxkv.errors import JaxkvError
from jaxkv.planning.plan import CachePlan
from jaxkv.request import Request, RequestStatus
from jaxkv.scheduling.demand import GroupDemand, Holding

if TYPE_CHECKING:
    from jaxkv.cache_manager import KVCacheManager
    from jaxkv.hits import PrefixHit


class Admission:
    """Says whether a request may start to run, and whether it ever could."""

    def __init__(self, plan: CachePlan, cache_manager: "KVCacheManager", watermark: float) -> None:
        self._plan = plan
        self._kv = cache_manager
        self._watermark_blocks = int(watermark * plan.usable_blocks)
        self._managers = cache_manager.managers
        self._demands = [GroupDemand(m.spec, m.width, plan.limits) for m in self._managers]

    def blocks_alone(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        """The most blocks a request that grows to `num_tokens` tokens holds, look-ahead included,
        with all tokens in flight its own.
        """
        limits = self._plan.limits
        slots = num_tokens + limits.num_lookahead_tokens
        return sum(
            d.at_start(num_encoder_tokens)
            if d.is_taken_at_start
            else d.spec.admission_blocks(slots, limits) * d.width
            for d in self._demands
        )

    def check_can_fit(self, request: Request, num_tokens: int) -> None:
        """Raises JaxkvError if the request, grown to `num_tokens` tokens,
        does not fit into the empty pool.
        """
        num_encoder_tokens, most = request.num_encoder_tokens, self._plan.limits.max_encoder_len
        if num_encoder_tokens > most:
            raise JaxkvError(
                f"request {request.request_id!r} has {num_encoder_tokens} encoder tokens, the plan is made "
                f"for at most {most}"
            )

        def alone(length: int) -> int:
            return self.blocks_alone(length, num_encoder_tokens)

        needed, usable = alone(num_tokens), self._plan.usable_blocks
        if needed <= usable:
            return
        fitting = max(0, bisect_right(range(num_tokens + 1), usable, key=alone) - 1)
        raise JaxkvError(
            f"request {request.request_id!r} of {request.num_tokens} prompt tokens can grow to {num_tokens} "
            f"tokens in the cache, which take {needed} blocks, but the pool has {usable} usable blocks: at "
            f"most {fitting} tokens fit"
        )

    def fits(
        self,
        request: Request,
        hit: "PrefixHit",
        *,
        rows: NDArray[np.int32],
        num_tokens: NDArray[np.int64],
        num_running: int,
    ) -> bool:
        """Whether a waiting request can start now, beside `num_running` others.

        rows, num_tokens: those of the others whose `num_tokens` known tokens have not all been given blocks.
        Beside others it must leave the watermark free. One that was preempted must also leave everybody,
        itself included, the next block of each group: otherwise it would soon lose its blocks again.
        """
        pool = self._kv.pool
        available = self._kv.num_free_blocks
        if num_running:
            available -= self._watermark_blocks
            if request.status is RequestStatus.PREEMPTED:
                available -= (num_running + 1) * sum(demand.width for demand in self._demands)
        lengths = [*num_tokens.tolist(), request.num_tokens]
        given = self._kv.rows.position[rows].tolist()
        ends = [
            [*map(demand.positions, given), hit.num_tokens // manager.block_size]
            for manager, demand in zip(self._managers, self._demands, strict=True)
        ]
        # Hit blocks that nobody holds leave the free ones when the request takes hold of them.
        for demand, part in zip(self._demands, hit.parts, strict=True):
            available -= pool.count_free(part.leaders) * demand.width
            if demand.is_taken_at_start:
                available -= demand.at_start(request.num_encoder_tokens)
        growing = [not demand.is_taken_at_start for demand in self._demands]
        at_most = sum(
            demand.at_most_wanted(lengths, reached)
            for demand, reached in compress(zip(self._demands, ends, strict=True), growing)
        )
        if at_most <= available:
            return True
        wanted = 0
        for manager, demand, part, reached in compress(
            zip(self._managers, self._demands, hit.parts, ends, strict=True), growing
        ):
            held = [*(manager.units_of(row) for row in rows.tolist()), part.leaders]
            leaders = np.concatenate(held)
            references = np.maximum(pool.holders[leaders], 0) + np.isin(leaders, part.leaders)
            wanted += demand.still_wanted(lengths, list(map(Holding, held, reached)), references)
        return wanted <= available
