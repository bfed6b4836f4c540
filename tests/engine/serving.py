"""Serving a tiny model in tests: engines that share one compiled runner."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxkv.cache_manager import KVCacheManager
from jaxkv.engine.buckets import Bucket
from jaxkv.engine.engine import Engine, Prompt
from jaxkv.engine.loading import LoadedModel
from jaxkv.engine.outputs import RequestOutput
from jaxkv.engine.poison import PoisoningRunner
from jaxkv.engine.sampling_params import SamplingParams
from jaxkv.engine.tokenizer import StreamDecoder
from jaxkv.planning import CachePlan, PlanConfig, make_plan
from jaxkv.scheduling import Scheduler, SchedulerConfig
from jaxkv.specs import MambaSpec

ROOT = Path(__file__).parents[2]
MAX_NUM_SEQS = 4
MAX_TOKENS_A_STEP = 32
MAX_MODEL_LEN = 96
BLOCK_SIZE = 4
NUM_BLOCKS = 200


def load_script(name: str):
    """A module of scripts/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_plan(loaded: LoadedModel, num_blocks: int, *, batches_in_flight: int = 1) -> CachePlan:
    config = PlanConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_TOKENS_A_STEP,
        max_num_seqs=MAX_NUM_SEQS,
        batches_in_flight=batches_in_flight,
        num_gpu_blocks_override=num_blocks,
        policy="unified",
    )
    return make_plan(loaded.cache_specs(BLOCK_SIZE), config, 2**30)


@dataclass
class Bench:
    """One compiled runner, whose pool is large; an engine may be given fewer blocks, fewer shapes, smaller
    limits.
    """

    loaded: LoadedModel
    runner: PoisoningRunner
    buckets: tuple[Bucket, ...]

    def engine(
        self,
        *,
        num_blocks: int = NUM_BLOCKS,
        caching: bool = True,
        max_num_seqs: int = MAX_NUM_SEQS,
        tokens_a_step: int = MAX_TOKENS_A_STEP,
        buckets: Sequence[Bucket] | None = None,
        overlap: bool = False,
        max_model_len: int | None = None,
        num_checkpoints: int | None = None,
        seed: int = 0,
    ) -> Engine:
        """num_checkpoints: states that a step may leave inside a chunk; None: as many as the runner's steps
        can.
        """
        plan = self._plan(num_blocks, 2 if overlap else 1, max_model_len, num_checkpoints)
        cache_manager = KVCacheManager(
            plan,
            enable_caching=caching,
            prefix_match_unit=plan.hash_block_size if plan.hits_below_blocks else None,
            max_num_seqs=max_num_seqs,
        )
        self.runner.buckets = self.buckets if buckets is None else tuple(buckets)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=tokens_a_step, async_scheduling=overlap
        )
        return Engine(
            self.runner,
            Scheduler(plan, cache_manager, config),
            cache_manager,
            make_decoder=lambda: StreamDecoder(self.loaded.tokenizer),
            end_token_ids=self.loaded.end_token_ids,
            seed=seed,
        )

    def _plan(
        self, num_blocks: int, batches_in_flight: int, max_model_len: int | None, num_checkpoints: int | None
    ) -> CachePlan:
        """The runner's plan with other limits."""
        plan = self.runner.plan
        limits = replace(
            plan.limits,
            max_in_flight_tokens=self.buckets[-1].num_tokens * batches_in_flight,
            max_model_len=max_model_len or plan.max_model_len,
        )
        groups = plan.groups
        if num_checkpoints is not None:
            groups = tuple(
                replace(group, spec=replace(group.spec, num_prefill_checkpoint_blocks=num_checkpoints))
                if isinstance(group.spec, MambaSpec)
                else group
                for group in groups
            )
        return replace(plan, groups=groups, num_blocks=num_blocks, limits=limits)


def run_to_end(engine: Engine, limit: int = 10_000) -> dict[str, RequestOutput]:
    """Steps until nothing is left; outputs by request id. Every block must then be accounted for."""
    outputs = {}
    for _ in range(limit):
        if not engine.has_unfinished_requests:
            engine.cache_manager.check_integrity()
            return outputs
        for delta in engine.step():
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
    raise AssertionError(f"not finished after {limit} steps")


def answers(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[RequestOutput]:
    """Outputs of prompts that all arrive at once."""
    ids = [engine.add_request(Prompt(token_ids=prompt), params) for prompt in prompts]
    outputs = run_to_end(engine)
    return [outputs[request_id] for request_id in ids]
