"""Runs a model through a real page pool, with block tables made the simplest way."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.specs import AttentionSpec, FullAttentionSpec, KVCacheSpec
from models.causal_lm import CausalLM
from models.paged_cache import CacheLayout, LayerPlace, PagedCache
from pallas_kernels import AttentionPageLayout, GroupTable, RaggedBatch

BLOCK_SIZE = 16


class Chunk(NamedTuple):
    """Some tokens of one sequence, the first of them at `start`."""

    sequence: int
    start: int
    tokens: Sequence[int]


class PagedRunner:
    """A model, a pool for `num_sequences` sequences of up to `max_len` tokens, and one step over chunks of
    them.

    Layers are in two groups, full and window; every sequence owns its blocks for good.
    """

    def __init__(
        self,
        model: CausalLM,
        specs: dict[str, KVCacheSpec],
        *,
        num_sequences: int,
        max_len: int,
        token_buckets: Sequence[int],
    ):
        """Every step is padded to the smallest of `token_buckets` that holds it."""
        groups = [
            [name for name, spec in specs.items() if isinstance(spec, FullAttentionSpec) == full]
            for full in (True, False)
        ]
        spec = next(iter(specs.values()))
        assert isinstance(spec, AttentionSpec)
        page = AttentionPageLayout.fitting(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
        )
        places = tuple(
            (name, LayerPlace(g, slot)) for g, names in enumerate(groups) for slot, name in enumerate(names)
        )
        slots = max(map(len, groups))
        self.layout = CacheLayout(places, (page,) * len(groups), slots)
        self.width = -(-max_len // spec.block_size)
        ids = 1 + np.arange(len(groups) * num_sequences * self.width, dtype=np.int32)
        self.block_ids = (
            np.random.default_rng(0).permutation(ids).reshape(len(groups), num_sequences, self.width)
        )
        self.pages = jnp.full(((1 + ids.size) * slots, page.page_rows, 128), 0x7FC07FC0, jnp.uint32)
        self.graph, self.state = nnx.split(model)
        self.rows, self.token_buckets = num_sequences, token_buckets
        self._step = jax.jit(self._run, donate_argnums=1)
        self._logits = jax.jit(lambda state, hidden: nnx.merge(self.graph, state).logits(hidden))

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
        block_ids = np.zeros((len(self.block_ids), rows, self.width), np.int32)
        at = 0
        for row, index in enumerate(order):
            chunk = chunks[index]
            end = at + len(chunk.tokens)
            tokens[at:end] = chunk.tokens
            positions[at:end] = np.arange(chunk.start, chunk.start + len(chunk.tokens))
            seq_ids[at:end], starts[row + 1 :], lens[row] = row, end, chunk.start + len(chunk.tokens)
            block_ids[:, row] = self.block_ids[:, chunk.sequence]
            at = end
        batch = RaggedBatch(
            positions=jnp.asarray(positions),
            seq_ids=jnp.asarray(seq_ids),
            query_starts=jnp.asarray(starts),
            seq_lens=jnp.asarray(lens),
            num_decodes=jnp.int32(sum(len(chunk.tokens) == 1 for chunk in chunks)),
            num_seqs=jnp.int32(len(chunks)),
        )
        tables = tuple(GroupTable(jnp.asarray(ids), jnp.zeros(rows, jnp.int32)) for ids in block_ids)
        hidden, self.pages = self._step(self.state, self.pages, tokens, batch, tables)
        by_row = np.split(np.asarray(hidden), starts[1 : len(chunks)])
        return [by_row[order.index(i)][: len(chunks[i].tokens)] for i in range(len(chunks))]
