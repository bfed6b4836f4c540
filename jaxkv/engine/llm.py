"""`LLM`: a model, its cache and the engine, made from a path or a name."""

import logging
import os
from collections.abc import Iterator, Sequence

import jax

from jaxkv.cache_manager import KVCacheManager
from jaxkv.engine.buckets import make_buckets
from jaxkv.engine.compilation_cache import use_compilation_cache
from jaxkv.engine.engine import Engine
from jaxkv.engine.kept_memory import keep_freed_memory
from jaxkv.engine.loading import LoadedModel, load_model
from jaxkv.engine.metrics import EngineMetrics
from jaxkv.engine.outputs import RequestDelta, RequestOutput
from jaxkv.engine.progress import compile_with_progress
from jaxkv.engine.prompts import PromptLike, PromptReader
from jaxkv.engine.runner import ModelRunner
from jaxkv.engine.sampling_params import SamplingParams
from jaxkv.engine.tokenizer import StreamDecoder
from jaxkv.errors import JaxkvError
from jaxkv.kv_cache_dtype import choose_kv_cache_dtype
from jaxkv.memory_size import parse_memory_size
from jaxkv.metrics import PrefixCacheStats
from jaxkv.planning import CachePlan, PlanConfig, make_plan
from jaxkv.scheduling.config import SchedulerConfig
from jaxkv.scheduling.scheduler import Scheduler
from jaxkv.specs import MambaSpec, check_int
from models.linear import arrange

logger = logging.getLogger(__name__)


class LLM:
    """Generates text with one model.

    model: a GGUF file, a Hugging Face folder, the name of a packaged model, or what `load_model` returned,
      whose matrices are then stored anew as the device multiplies by them fastest.
    dtype: of weights and cache, "bfloat16", "float32" or "auto" (the checkpoint's).
    kv_cache_dtype: of keys and values, "bfloat16", "float32", "fp8", "int8" (or vLLM's longer names of these,
      see `jaxkv.kv_cache_dtype`) or "auto", which is `dtype`. In fp8 (e4m3) and int8 each token and head has
      a float32 scale for K and one for V, in the page; recurrent states stay as they are. The TPU kernels
      serve these in blocks of 16, 32 or 64 tokens, or a multiple of 128 (`block_size`).
    state_dtype: of recurrent states that accumulate (Mamba, gated DeltaNet), "bfloat16", "float32" or "auto",
      which is what the config says, else `dtype`, as in vLLM. A state in bfloat16 is rounded where a prompt
      is divided or resumed, and answers can depend on that (a warning says so); in float32 it takes twice
      the room.
    max_model_len: longest prompt and answer together; None: what the model was made for, or less where the
      memory holds less.
    max_num_seqs: most requests that run at once. max_num_batched_tokens: most tokens of one step.
    memory: of the pool of pages, in bytes or as "1GiB". block_size: tokens of a block.
    seed: from which requests without a seed of their own draw one.
    policy: how layers are put in groups, "split" or "unified".
    prefix_match_unit: hits may end inside a block, at any multiple of so many tokens; None: at whole blocks.
    num_prefill_checkpoints: states for later prompts that recurrent layers may leave inside one chunk of a
      prompt; each takes room while a prompt is read, and where there are fewer than wanted, chunks end there.
    implementation: which kernels, by name; None: the platform's.
    async_scheduling: schedule a step while the one before it runs.
    decode_buckets, prefill_buckets: sizes of the steps to compile (see `buckets.make_buckets`); None: chosen.
    warm_up: compile now; else `warm_up()` must be called before the first step.
    progress: show a bar while compiling.

    Raises JaxkvError for whatever cannot work, before the pool is allocated where it can be known then.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel,
        *,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        state_dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 1024,
        memory: str | int = "1GiB",
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        policy: str = "split",
        prefix_match_unit: int | None = None,
        num_prefill_checkpoints: int = 1,
        implementation: str | None = None,
        async_scheduling: bool = False,
        decode_buckets: Sequence[int] | None = None,
        prefill_buckets: Sequence[int] | None = None,
        warm_up: bool = True,
        progress: bool = False,
    ) -> None:
        memory_bytes = parse_memory_size(memory)
        check_int("seed", seed, 0)
        check_int("max_num_seqs", max_num_seqs, 1)
        check_int("max_num_batched_tokens", max_num_batched_tokens, 1)
        if max_model_len is not None:
            check_int("max_model_len", max_model_len, 1)
        check_int("num_prefill_checkpoints", num_prefill_checkpoints, 0)
        choose_kv_cache_dtype(kv_cache_dtype, dtype)
        buckets = make_buckets(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            decode_seqs=decode_buckets,
            prefill_tokens=prefill_buckets,
        )
        scheduler_config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            async_scheduling=async_scheduling,
        )
        self.loaded = model if isinstance(model, LoadedModel) else load_model(model, dtype)
        arrange(self.loaded.model, jax.default_backend())
        self.plan: CachePlan = make_plan(
            self.loaded.cache_specs(
                block_size,
                kv_cache_dtype=kv_cache_dtype,
                state_dtype=state_dtype,
                enable_prefix_caching=enable_prefix_caching,
                num_prefill_checkpoints=num_prefill_checkpoints,
            ),
            PlanConfig(
                policy=policy,
                max_model_len=self._longest(max_model_len),
                auto_fit_max_model_len=max_model_len is None,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                batches_in_flight=scheduler_config.batches_in_flight,
                enable_prefix_caching=enable_prefix_caching,
                prefix_match_unit=prefix_match_unit,
                align_hybrid_blocks=True,
            ),
            memory_bytes,
        )
        self._warn_of_rounding()
        cache_manager = KVCacheManager(
            self.plan,
            enable_caching=enable_prefix_caching,
            prefix_match_unit=prefix_match_unit,
            max_num_seqs=max_num_seqs,
        )
        self._reader = PromptReader(
            tokenizer=self.loaded.tokenizer,
            vocab_size=self.loaded.config.vocab_size,
            max_model_len=self.plan.max_model_len,
        )
        use_compilation_cache()
        runner = ModelRunner(
            self.loaded.model,
            self.plan,
            buckets=buckets,
            max_num_seqs=max_num_seqs,
            implementation=implementation,
        )
        if jax.default_backend() == "cpu":
            keep_freed_memory()
        self.engine = Engine(
            runner,
            Scheduler(self.plan, cache_manager, scheduler_config),
            cache_manager,
            make_decoder=lambda: StreamDecoder(self.loaded.tokenizer),
            end_token_ids=self.loaded.end_token_ids,
            seed=seed,
        )
        if warm_up:
            self.warm_up(progress=progress)

    def _warn_of_rounding(self) -> None:
        """Says where states are rounded to fewer bits than they are computed in."""
        specs = (group.spec for group in self.plan.groups)
        if any(isinstance(spec, MambaSpec) and "bfloat16" in spec.dtypes[1:] for spec in specs):
            logger.warning(
                "recurrent states are kept in bfloat16, as in vLLM: they are rounded where a prompt is "
                "divided or resumed, and answers can depend on that; with state_dtype float32 they are not"
            )

    def warm_up(self, *, progress: bool = False) -> None:
        """Compiles every shape of a step, so that nothing compiles while serving. `progress` draws a bar."""
        compile_with_progress(self.engine.runner, show=progress)

    @property
    def metrics(self) -> EngineMetrics:
        return self.engine.metrics

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        """How much of the prompts was looked up and found in the cache."""
        return self.engine.cache_manager.prefix_cache_stats

    @property
    def has_unfinished_requests(self) -> bool:
        return self.engine.has_unfinished_requests

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts (text or token ids; one or several), in their order. params: one for all, or one
        each.
        """
        request_ids = self.submit(prompts, params)
        outputs = {
            delta.request_id: delta.output for delta in self._run(request_ids) if delta.output is not None
        }
        return [outputs[request_id] for request_id in request_ids]

    def stream(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestDelta]:
        """Like `generate`, piece by piece as it comes. Leaving the loop early aborts what is unfinished."""
        return self._run(self.submit(prompts, params))

    def submit(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[str]:
        """Puts prompts in the queue for `step` to serve; their request ids. All are checked before any is
        queued.
        """
        checked = self._reader.read(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [SamplingParams() if params is None else params] * len(checked)
        if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
            raise JaxkvError(f"params must be one SamplingParams or a list of them, not {params!r}")
        if len(params) != len(checked):
            raise JaxkvError(f"{len(checked)} prompts need one SamplingParams or as many, not {len(params)}")
        request_ids: list[str] = []
        try:
            for prompt, prompt_params in zip(checked, params, strict=True):
                request_ids.append(self.engine.add_request(prompt, prompt_params))
        except JaxkvError:
            self.engine.abort(request_ids)
            raise
        return request_ids

    def check(self, prompts: PromptLike | Sequence[PromptLike]) -> None:
        """Raises JaxkvError for prompts that cannot be served; does nothing else, and needs no `warm_up`."""
        self._reader.read(prompts)

    def step(self) -> list[RequestDelta]:
        """Runs one step of everything in the queue."""
        return self.engine.step()

    def abort(self, request_ids: Sequence[str]) -> list[RequestDelta]:
        """Ends requests early; each one's last delta holds what it had."""
        return self.engine.abort(request_ids)

    def _run(self, request_ids: list[str]) -> Iterator[RequestDelta]:
        unfinished = set(request_ids)
        try:
            while unfinished:
                for delta in self.engine.step():
                    if delta.output is not None:
                        unfinished.discard(delta.request_id)
                    if delta.request_id in request_ids:
                        yield delta
        finally:
            self.engine.abort(unfinished)

    def _longest(self, max_model_len: int | None) -> int:
        if max_model_len is None:
            return self.loaded.max_model_len
        if max_model_len > self.loaded.max_model_len:
            raise JaxkvError(
                f"max_model_len {max_model_len} is more than the {self.loaded.max_model_len} tokens that "
                f"{self.loaded.name} was made for"
            )
        return max_model_len
