"""Runs scheduled steps on the device: owns the weights, the pool of pages and the compiled steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from jaxkv.block_tables import BlockTable, StateTable, padded_tables
from jaxkv.cache_manager import KVCacheManager
from jaxkv.engine.block_copies import BlockCopier
from jaxkv.engine.buckets import Bucket, pick_bucket
from jaxkv.engine.cache_layout import cache_layout
from jaxkv.engine.draws import uniform_draws
from jaxkv.engine.sampling_table import SamplingTable
from jaxkv.engine.step import CompiledSteps, StepFunction, StepOutputs
from jaxkv.engine.step_inputs import BlockTableShape, StateTableShape, StepShape, TableShape
from jaxkv.engine.step_order import count_decodes
from jaxkv.engine.table_checks import check_blocks, check_states, check_written_states
from jaxkv.errors import JaxkvError
from jaxkv.memory_size import format_bytes
from jaxkv.planning.plan import CachePlan
from jaxkv.request_table import RequestTable
from jaxkv.scheduling.output import SchedulerOutput
from jaxkv.specs import MambaSpec

_LANES = 128
_WORD_BYTES = 4


def _allocate(shape: tuple[int, int, int]) -> jax.Array:
    """A pool uint32[shape] of zeros. JaxkvError where the device has no room for it."""
    try:
        return jax.block_until_ready(jnp.zeros(shape, jnp.uint32))
    except jax.errors.JaxRuntimeError as error:
        size = format_bytes(_WORD_BYTES * math.prod(shape))
        raise JaxkvError(
            f"the device has no room for a cache of {size}: give it less memory ({error})"
        ) from error


class StepLogprobs(NamedTuple):
    """Log probabilities of the sampled rows, on the host: chosen float32[m], top float32[m, K], top_ids
    int32[m, K].
    """

    chosen: NDArray[np.float32]
    top: NDArray[np.float32]
    top_ids: NDArray[np.int32]


@dataclass(frozen=True)
class StartedStep:
    """A step that the device works on; asking for its results waits for them. outputs: None for an empty
    step.
    """

    output: SchedulerOutput
    outputs: StepOutputs | None

    def tokens(self) -> NDArray[np.int32]:
        """int32[m]: the chosen token of each row that samples, in the order of the rows."""
        if self.outputs is None:
            return np.empty(0, np.int32)
        return np.asarray(self.outputs.tokens)[: len(self.output.sampling)]

    def logprobs(self) -> StepLogprobs:
        """Of the same rows. Not to be asked of an empty step."""
        assert self.outputs is not None
        count = len(self.output.sampling)
        return StepLogprobs(*(np.asarray(part)[:count] for part in self.outputs.logprobs))


class ModelRunner:
    """One model, one pool.

    model: an nnx module (see `models`). max_num_seqs: most rows of a step. implementation: which kernels, by
    name.
    """

    def __init__(
        self,
        model: nnx.Module,
        plan: CachePlan,
        *,
        buckets: Sequence[Bucket],
        max_num_seqs: int,
        implementation: str | None = None,
    ) -> None:
        self.plan = plan
        self.buckets = tuple(buckets)
        graph, state = nnx.split(model)
        leaves, tree = jax.tree.flatten(state)
        self._weights = tuple(leaves)
        shapes = [StepShape(bucket, _table_shapes(plan, bucket)) for bucket in self.buckets]
        function = StepFunction(graph, tree, cache_layout(plan, implementation), max_num_seqs)
        self.steps = CompiledSteps(function, shapes)
        self._copier = BlockCopier(plan.layer_slots)
        rows = plan.page_size_bytes // (_WORD_BYTES * _LANES)
        self.pages: jax.Array = _allocate((plan.num_blocks * plan.layer_slots, rows, _LANES))
        self._previous: jax.Array = jnp.zeros(max_num_seqs, jnp.int32)
        self._previous_output: SchedulerOutput | None = None

    def compile(self, on_done: Callable[[Bucket], None] = lambda bucket: None) -> None:
        """Compiles the step for every bucket; `on_done` is called after each."""
        if self.plan.hits_below_blocks:
            self._copier.compile(self.pages)
        self.steps.compile(self._weights, self.pages, on_done)

    def start(
        self,
        output: SchedulerOutput,
        table: RequestTable,
        cache_manager: KVCacheManager,
        sampling: SamplingTable,
    ) -> StartedStep:
        """Starts the device on a step and returns at once. Raises JaxkvError, with nothing started, for a
        block id that the step must not touch: JAX would clip it silently.
        """
        bucket = pick_bucket(
            self.buckets, num_tokens=output.total_num_scheduled_tokens, num_seqs=len(output.rows)
        )
        shape = self.steps.shapes[bucket]
        tables = self._tables(output, cache_manager, shape)
        num_decodes = count_decodes(self.plan, output, tables)
        if bucket.decode_only and num_decodes < len(output.rows):
            bucket = pick_bucket(
                [bucket for bucket in self.buckets if not bucket.decode_only],
                num_tokens=output.total_num_scheduled_tokens,
                num_seqs=len(output.rows),
            )
            shape = self.steps.shapes[bucket]
            tables = self._tables(output, cache_manager, shape)
        words = np.zeros(shape.num_words, np.int32)
        views = shape.views(words)
        self._fill_tokens(views, output, table)
        views["num_decodes"][...] = num_decodes
        self._fill_tables(views, output, tables)
        check_written_states(cache_manager, output)
        _fill_sampling(views, output, sampling)
        self.pages = self._copier.run(self.pages, cache_manager.take_block_copies())
        outputs = self.steps.run(bucket, self._weights, self.pages, self._previous, words)
        self.pages, self._previous = outputs.pages, outputs.tokens
        self._previous_output = output
        return StartedStep(output, outputs)

    def _tables(
        self, output: SchedulerOutput, cache_manager: KVCacheManager, shape: StepShape
    ) -> list[BlockTable | StateTable]:
        return padded_tables(
            cache_manager,
            output.rows,
            output.num_computed,
            num_seqs=shape.bucket.num_seqs,
            widths=[table.width for table in shape.tables],
        )

    def _fill_tokens(self, views: dict[str, NDArray], output: SchedulerOutput, table: RequestTable) -> None:
        arrays = output.token_arrays(table)
        count, rows = len(arrays.tokens), len(output.rows)
        carried = output.carried(self._previous_output, arrays)
        views["tokens"][:count] = np.where(carried < 0, arrays.tokens, 0)
        views["carried"][:count] = carried
        views["carried"][count:] = -1
        views["positions"][:count] = arrays.positions
        views["seq_ids"].fill(views["seq_lens"].shape[0])
        views["seq_ids"][:count] = np.repeat(np.arange(rows, dtype=np.int32), output.num_scheduled)
        views["query_starts"][: rows + 1] = arrays.query_starts
        views["query_starts"][rows + 1 :] = count
        views["seq_lens"][:rows] = arrays.seq_lens
        views["num_seqs"][...] = rows
        views["sampled"][: len(output.sampling)] = arrays.query_starts[1:][output.sampling] - 1
        views["num_samples"][...] = len(output.sampling)

    def _fill_tables(
        self, views: dict[str, NDArray], output: SchedulerOutput, tables: Sequence[BlockTable | StateTable]
    ) -> None:
        for group, table in enumerate(tables):
            if isinstance(table, BlockTable):
                check_blocks(self.plan, group, table, output)
            else:
                check_states(self.plan, group, table, output)
            for name, array in table._asdict().items():
                views[f"{name}.{group}"][...] = array


def _table_shapes(plan: CachePlan, bucket: Bucket) -> tuple[TableShape, ...]:
    """By group. A decode never leaves a state inside its one token."""
    shapes: list[TableShape] = []
    for group, most in zip(plan.groups, plan.blocks_per_request, strict=True):
        if isinstance(group.spec, MambaSpec):
            checkpoints = 0 if bucket.decode_only else group.spec.num_prefill_checkpoint_blocks
            shapes.append(StateTableShape(width=checkpoints, num_blocks=group.blocks_per_state))
        else:
            shapes.append(BlockTableShape(width=most))
    return tuple(shapes)


def _fill_sampling(views: dict[str, NDArray], output: SchedulerOutput, sampling: SamplingTable) -> None:
    rows = output.rows[output.sampling]
    for name in ("temperature", "top_k", "top_p"):
        views[name][: len(rows)] = getattr(sampling, name)[rows]
    position = (output.num_computed + output.num_scheduled)[output.sampling]
    banned = np.flatnonzero(position < sampling.first_end[rows])
    if len(banned):
        views["num_banned"][banned] = sampling.num_end_tokens[rows[banned]]
        views["banned"][banned] = sampling.end_tokens[rows[banned]]
    if views["temperature"].any():
        views["uniform"][: len(rows)] = uniform_draws(sampling.seed[rows], position)
    views["top_p"][len(rows) :] = 1
    views["wants_logprobs"][...] = sampling.wants_logprobs[rows].any()
