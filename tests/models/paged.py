"""Runs a model through a real page pool, with block tables made the simplest way."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from jaxkv.engine.cache_layout import cache_layout
from jaxkv.planning import PlanConfig, make_plan
from jaxkv.planning.plan import CacheGroup
from jaxkv.specs import KVCacheSpec, MambaSpec
from models.causal_lm import CausalLM
from models.paged_cache import PagedCache
from pallas_kernels import GroupTable, RaggedBatch
from pallas_kernels.recurrent import StateTable

BLOCK_SIZE = 16
NAN_WORD = 0x7FC0_7FC0

CompilerOptions = dict[str, str | bool | int]
COMPILE_FAST: CompilerOptions = {"xla_backend_optimization_level": 0}
"""For tiny models, which take longer to compile than to run."""


class Chunk(NamedTuple):
    """Some tokens of one sequence, the first of them at `start`."""

    sequence: int
    start: int
    tokens: Sequence[int]


class PagedRunner:
    """A model, a pool for `num_sequences` sequences of up to `max_len` tokens, and one step over chunks of
    them.

    Every sequence owns its blocks for good: of attention layers all it may need, of recurrent layers two
    states, of which every step reads one and writes the other.
    """

    def __init__(
        self,
        model: CausalLM,
        specs: dict[str, KVCacheSpec],
        *,
        num_sequences: int,
        max_len: int,
        token_buckets: Sequence[int],
        policy: str = "split",
        compiler_options: CompilerOptions | None = None,
    ):
        """Every step is padded to the smallest of `token_buckets` that holds it."""
        config = PlanConfig(policy=policy, max_model_len=max_len, max_num_seqs=num_sequences)
        self.plan = make_plan(specs, config, 2**30)
        self.layout = cache_layout(self.plan)
        self.blocks = self._own_blocks(num_sequences, max_len)
        page_rows = self.plan.page_size_bytes // 512
        num_pages = (1 + sum(blocks.size for blocks in self.blocks)) * self.plan.layer_slots
        self.pages = jnp.full((num_pages, page_rows, 128), NAN_WORD, jnp.uint32)
        self.state_to_write = np.zeros(num_sequences, np.int32)
        self.graph, self.state = nnx.split(model)
        self.rows, self.token_buckets = num_sequences, token_buckets
        self._step = jax.jit(self._run, donate_argnums=1, compiler_options=compiler_options)
        self._logits = jax.jit(lambda state, hidden: nnx.merge(self.graph, state).logits(hidden))

    def _own_blocks(self, num_sequences: int, max_len: int) -> list[NDArray[np.int32]]:
        """By group: ids [sequences, blocks], for recurrent layers [sequences, 2, blocks of a state]; in no
        order.
        """

        def shape(group: CacheGroup) -> tuple[int, ...]:
            if isinstance(group.spec, MambaSpec):
                return num_sequences, 2, group.blocks_per_state
            return num_sequences, -(-max_len // group.block_size)

        shapes = [shape(group) for group in self.plan.groups]
        ends = np.cumsum([np.prod(shape) for shape in shapes])
        ids = 1 + np.random.default_rng(0).permutation(ends[-1]).astype(np.int32)
        return [part.reshape(shape) for part, shape in zip(np.split(ids, ends[:-1]), shapes, strict=True)]

    def _run(self, state, pages, tokens, batch, tables):
        model = nnx.merge(self.graph, state)
        hidden, cache = model(tokens, batch.positions, PagedCache(pages, batch, tables, self.layout))
        return hidden, cache.pages

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """float32[N, V] for hidden[N, D]."""
        padded = np.pad(hidden, ((0, self._bucket(len(hidden)) - len(hidden)), (0, 0)))
        return np.asarray(self._logits(self.state, padded))[: len(hidden)]

    def _bucket(self, n: int) -> int:
        return min(size for size in self.token_buckets if size >= n)

    def step(self, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        """Runs the chunks as one batch, single tokens first: hidden states [len(tokens), D] of each chunk."""
        order = sorted(range(len(chunks)), key=lambda i: len(chunks[i].tokens) > 1)
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        rows, size = self.rows, self._bucket(num_tokens)
        tokens, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        seq_ids = np.full(size, rows, np.int32)
        starts, lens = np.zeros(rows + 1, np.int32), np.zeros(rows, np.int32)
        at = 0
        for row, index in enumerate(order):
            chunk = chunks[index]
            end = at + len(chunk.tokens)
            tokens[at:end] = chunk.tokens
            positions[at:end] = np.arange(chunk.start, chunk.start + len(chunk.tokens))
            seq_ids[at:end], starts[row + 1 :], lens[row] = row, end, chunk.start + len(chunk.tokens)
            at = end
        batch = RaggedBatch(
            positions=jnp.asarray(positions),
            seq_ids=jnp.asarray(seq_ids),
            query_starts=jnp.asarray(starts),
            seq_lens=jnp.asarray(lens),
            num_decodes=jnp.int32(sum(len(chunk.tokens) == 1 for chunk in chunks)),
            num_seqs=jnp.int32(len(chunks)),
        )
        tables = self._tables([chunks[index] for index in order])
        hidden, self.pages = self._step(self.state, self.pages, tokens, batch, tables)
        by_row = np.split(np.asarray(hidden), starts[1 : len(chunks)])
        return [by_row[order.index(i)][: len(chunks[i].tokens)] for i in range(len(chunks))]

    def _tables(self, chunks: Sequence[Chunk]) -> tuple[GroupTable | StateTable, ...]:
        """The groups' tables for a batch of these chunks, in this order."""
        sequences = [chunk.sequence for chunk in chunks]
        write = self.state_to_write[sequences]
        self.state_to_write[sequences] = 1 - write
        begins = np.array([chunk.start == 0 for chunk in chunks])
        tables = []
        for group, blocks in zip(self.plan.groups, self.blocks, strict=True):
            ids = np.zeros((self.rows, blocks.shape[-1]), np.int32)
            if not isinstance(group.spec, MambaSpec):
                ids[: len(chunks)] = blocks[sequences]
                tables.append(GroupTable(jnp.asarray(ids), jnp.zeros(self.rows, jnp.int32)))
                continue
            read = ids.copy()
            ids[: len(chunks)] = blocks[sequences, write]
            read[: len(chunks)] = np.where(begins[:, None], 0, blocks[sequences, 1 - write])
            none = jnp.zeros((self.rows, 0, blocks.shape[-1]), jnp.int32)
            tables.append(StateTable(jnp.asarray(read), jnp.asarray(ids), none[:, :, 0], none))
        return tuple(tables)
