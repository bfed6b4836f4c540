"""Replays operations, one call of the cache manager after another."""

from typing import Any

import numpy as np

from jaxkv.cache_manager import KVCacheManager
from jaxkv.errors import JaxkvError
from jaxkv.hits import PrefixHit
from jaxkv.request import Request
from jaxkv.scenario.inspection import events_entry, hit_entry, pool_entry, stats_entry
from jaxkv.scenario.manager import make_manager
from jaxkv.scenario.ops import Op
from jaxkv.scenario.plan_mode import replay_plan
from jaxkv.scenario.scenario import Scenario
from jaxkv.scenario.tokens import DECODE_TOKEN_BASE
from jaxkv.scheduling.chunks import chunk_end


def replay_ops(scenario: Scenario) -> dict[str, Any]:
    """The answer: one entry an op. Raises JaxkvError where the groups do not go together.

    An op that the cache manager refuses is an answer too, and changes nothing: its entry has an `error`.
    """
    plan = replay_plan(scenario)
    replay = OpReplay(scenario, make_manager(plan, scenario.config))
    return {
        "mode": "replay",
        "scheduler_block_size": plan.scheduler_block_size,
        "hash_block_size": plan.hash_block_size,
        "cache_hit_alignment_tokens": plan.scheduler_block_size,
        "ops": [replay.run(op) for op in scenario.ops],
    }


class OpReplay:
    """The requests of a replay and the manager that they are served from."""

    def __init__(self, scenario: Scenario, manager: KVCacheManager) -> None:
        self._config = scenario.config
        self._manager = manager
        self._requests: dict[str, Request] = {}
        self._with_blocks: set[str] = set()

    def run(self, op: Op) -> dict[str, Any]:
        """Does one op and says what came of it."""
        entry: dict[str, Any] = {"op": op.name}
        if op.request_id:
            entry["id"] = op.request_id
        try:
            entry |= self._do(op)
        except JaxkvError as error:
            entry |= {"result": "refused", "error": {"type": type(error).__name__, "message": str(error)}}
        return entry

    def _do(self, op: Op) -> dict[str, Any]:
        if op.name == "new":
            return self._new(op)
        if op.name == "prefill":
            return self._prefill(op)
        if op.name == "decode":
            return self._decode(op)
        if op.name == "pool":
            return pool_entry(self._manager)
        if op.name == "stats":
            return stats_entry(self._manager)
        if op.name == "events":
            return events_entry(self._manager)
        if op.name == "reset_prefix_cache":
            return {"result": self._manager.reset_prefix_cache()}
        request = self._requests[op.request_id]
        if op.name == "lookup":
            return self._lookup(request)
        if op.name == "step":
            self._start_step(op.new_step)
            return self._step(request, op.num_tokens, request.num_tokens)
        # preempt, free
        self._manager.free(request)
        self._with_blocks.discard(op.request_id)
        if op.name == "preempt":
            request.num_computed_tokens = 0
            request.num_preemptions += 1
        else:
            del self._requests[op.request_id]
        return {"free_blocks": self._manager.num_free_blocks}

    def _new(self, op: Op) -> dict[str, Any]:
        assert op.tokens is not None  # the parser saw to it
        self._requests[op.request_id] = Request(
            op.request_id, op.tokens, cache_salt=op.cache_salt, lora_name=op.lora_name
        )
        return {"num_tokens": len(op.tokens)}

    def _lookup(self, request: Request) -> dict[str, Any]:
        """What a step from now on would find: all that the ops so far computed is there.

        It starts no step: whether the next chunk does is for that chunk to say.
        """
        clock = self._manager.clock
        clock.step += 1
        try:
            return hit_entry(self._manager.get_computed_blocks(request))
        finally:
            clock.step -= 1

    def _prefill(self, op: Op) -> dict[str, Any]:
        request = self._requests[op.request_id]
        stop = min(op.upto or request.num_tokens, request.num_tokens)
        chunk = op.chunk or self._config.max_num_batched_tokens
        steps: list[dict[str, Any]] = []
        while request.num_computed_tokens < stop:
            self._start_step(op.new_step or bool(steps))
            steps.append(self._step(request, chunk, stop))
            if steps[-1]["result"] != "ok":
                break
        return {"steps": steps}

    def _decode(self, op: Op) -> dict[str, Any]:
        """Appends and computes tokens one by one; the answer has the last step, or with `verbose` all."""
        request = self._requests[op.request_id]
        steps: list[dict[str, Any]] = []
        for index in range(op.n):
            token = DECODE_TOKEN_BASE + request.num_tokens if op.tokens is None else op.tokens[index]
            request.append_tokens(np.array([token], dtype=np.int32))
            self._start_step(op.new_step or index > 0)
            steps.append(self._step(request, 1, request.num_tokens))
            if steps[-1]["result"] != "ok":
                break
        return {"steps": steps if op.verbose else steps[-1:], "num_steps": len(steps)}

    def _start_step(self, is_new: bool) -> None:
        if is_new:
            self._manager.new_step_starts()

    def _step(self, request: Request, max_tokens: int, stop: int) -> dict[str, Any]:
        """Computes at most `max_tokens` tokens of the request, not beyond `stop`."""
        entry: dict[str, Any] = {"id": request.request_id}
        hit: PrefixHit | None = None
        start = request.num_computed_tokens
        if request.request_id not in self._with_blocks:
            hit = self._manager.get_computed_blocks(request)
            entry |= hit_entry(hit)
            start = hit.num_tokens
            if hit.pending:
                return entry | {"result": "wait"}
        end = chunk_end(
            start,
            min(start + max_tokens, stop),
            request.num_tokens,
            self._manager.chunk_alignment,
            self._manager.checkpoint_positions(request, hit),
        )
        allocation = self._manager.allocate_slots(
            request, end - start, hit=hit, num_lookahead_tokens=self._config.num_lookahead_tokens
        )
        entry["tokens"] = [start, end]
        if allocation is None:
            return entry | {"result": "no_space", "free_blocks": self._manager.num_free_blocks}
        self._with_blocks.add(request.request_id)
        request.num_computed_tokens = end
        entry["result"] = "ok"
        entry["free_blocks"] = self._manager.num_free_blocks
        entry["block_tables"] = [list(ids) for ids in self._manager.get_block_ids(request.request_id)]
        return entry
