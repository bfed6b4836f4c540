"""What one decode step costs the cache manager under a plan."""

import dataclasses
import time

import numpy as np

from jaxkv.cache_manager import KVCacheManager
from jaxkv.planning import CachePlan
from jaxkv.request import Request

NUM_REQUESTS = 32
PROMPT_TOKENS = 512
STEPS = 32
ROUNDS = 3
_SAMPLED = np.array([7], np.int32)


def decode_step_microseconds(plan: CachePlan) -> float:
    """Mean processor time of `allocate_decodes` for NUM_REQUESTS requests over STEPS steps, the best of
    ROUNDS.
    """
    needed = sum(
        group.spec.admission_blocks(PROMPT_TOKENS + ROUNDS * STEPS, plan.limits) * group.blocks_per_state
        for group in plan.groups
    )
    roomy = dataclasses.replace(plan, num_blocks=NUM_REQUESTS * (needed + 8) + 2)
    manager = KVCacheManager(roomy, max_num_seqs=NUM_REQUESTS)
    requests = [_prefilled(manager, roomy, number) for number in range(NUM_REQUESTS)]
    rows = np.array([manager.row_of(request.request_id) for request in requests], np.int32)
    after = np.full(NUM_REQUESTS, PROMPT_TOKENS + 1, np.int64)
    rounds = []
    for _ in range(ROUNDS):
        spent = 0.0
        for _ in range(STEPS):
            start = time.thread_time()
            done = manager.allocate_decodes(rows, after).num_done
            spent += time.thread_time() - start
            if done < NUM_REQUESTS:
                raise RuntimeError("the pool is too small for the measurement")
            manager.new_step_starts()
            for request in requests:
                request.num_computed_tokens += 1
                request.append_tokens(_SAMPLED)
                request.block_hashes(manager.hasher)
            after += 1
        rounds.append(spent)
    return min(rounds) / STEPS * 1e6


def _prefilled(manager: KVCacheManager, plan: CachePlan, number: int) -> Request:
    """A request whose prompt is computed, in two chunks: up to the last boundary, and the rest."""
    tokens = np.random.default_rng(number).integers(1, 30_000, PROMPT_TOKENS, dtype=np.int32)
    request = Request(f"request {number}", tokens)
    request.block_hashes(manager.hasher)
    boundary = (PROMPT_TOKENS - 1) // plan.scheduler_block_size * plan.scheduler_block_size
    for end in sorted({boundary, PROMPT_TOKENS} - {0}):
        if manager.allocate_slots(request, end - request.num_computed_tokens) is None:
            raise RuntimeError("the pool is too small for the measurement")
        request.num_computed_tokens = end
        manager.new_step_starts()
    return request
