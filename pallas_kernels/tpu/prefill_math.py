"""What the prefill kernel does with a chunk of pages: adds it to the running softmax of each KV head."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.chip import matrix_width
from pallas_kernels.tpu.loaders import Loader
from pallas_kernels.tpu.operands import PAIRED_ROWS, clear_run
from pallas_kernels.tpu.places import Places
from pallas_kernels.tpu.quantised import Scales
from pallas_kernels.tpu.running import HIDDEN, LOG2_E, Softmax

BLOCK_ROWS = 1024  # of scores as wide as the matrix unit: what is asked for at once
RESULT_ROWS = 256  # of a place that are merged and divided, or whose queries are made, at once


class TileScratch(NamedTuple):
    """What the kernel keeps in VMEM between and within chunks (refs).

    Of a tile: `queries [Hkv, rows, depth]` where they are not as they come, else None; `top [Hkv, rows,
    128]`, all lanes equal, and `sums [Hkv, rows, sums_width]` of the softmaxes, float32.

    Of a chunk, two of each in turns: `keys [2, units, depth]` and `values [2, units, ...]` of a KV head;
    `scores [2, block_rows, units]` of a block, and what its sums shrink by, `[2, block_rows, 128]`, float32.
    """

    queries: Any
    top: Any
    sums: Any
    keys: Any
    values: Any
    scores: Any
    shrink: Any


class RowBlock(NamedTuple):
    """Some rows of one KV head, of one place."""

    head: int
    place: int
    row: int
    size: int

    @property
    def rows(self) -> slice:
        """Among all rows of the head."""
        return slice(self.row, self.row + self.size)


@dataclass(frozen=True)
class PrefillMath:
    """Static half of the mathematics. A tile has `place_rows` rows for each place in a 128-word row; row r of
    a place is query `r // group` of the tile. A chunk has `units` rows of K and V.
    """

    settings: AttentionSettings
    loader: Loader
    group: int
    place_rows: int
    units: int

    @property
    def places(self) -> Places:
        """The places of tokens in a row."""
        return self.loader.places

    @property
    def rows(self) -> int:
        """Rows of a tile of one KV head."""
        return self.place_rows * self.places.count

    @property
    def sums_width(self) -> int:
        """Lanes of a row's sums: its weighted V, then the total of its weights or, without `totals_ride`, 128
        parts of that.
        """
        return self.loader.value_width + LANES

    @cached_property
    def totals_ride(self) -> bool:
        """Whether weights are added up by their product with V, in lanes of the matrix unit that are free.

        Weights of 8-bit V are not: they are multiplied by its scales before.
        """
        free = -self.loader.value_width % matrix_width()
        return free >= LANES and not self.loader.layout.is_quantised

    @cached_property
    def splits_queries(self) -> bool:
        """Whether q takes its factor before its product, as the sum of two bfloat16 side by side: K then lies
        there twice. Depth of the matrix unit that a head leaves free saves multiplying every score; where
        tokens are shifted apart, making K twice costs more.
        """
        loader = self.loader
        small = loader.dtype == jnp.bfloat16 and not loader.layout.is_quantised
        return small and loader.shifts == 1 and 2 * loader.key_width <= matrix_width()

    @property
    def keeps_queries(self) -> bool:
        """Whether products take other queries than those that come."""
        return self.splits_queries or self.places.count > 1

    @property
    def depth(self) -> int:
        """Lanes of q and K in products."""
        return self.loader.key_width * (2 if self.splits_queries else 1)

    @property
    def block_rows(self) -> int:
        """Rows of a block, at most: few scores lie idle then, but many for the long products of latents."""
        scores = BLOCK_ROWS * matrix_width() * (2 if self.loader.layout.latent else 1)
        blocks = -(-self.place_rows * self.units // scores)
        return -(-self.place_rows // blocks // PAIRED_ROWS) * PAIRED_ROWS

    @property
    def scratch_shapes(self) -> TileScratch:
        """The scratch of a call."""
        heads, dtype = self.loader.layout.num_kv_heads, self.loader.operand_dtype
        values = self.sums_width if self.totals_ride else self.loader.value_width
        return TileScratch(
            queries=(
                pltpu.VMEM((heads, self.rows, self.depth), self.loader.dtype) if self.keeps_queries else None
            ),
            top=pltpu.VMEM((heads, self.rows, LANES), jnp.float32),
            sums=pltpu.VMEM((heads, self.rows, self.sums_width), jnp.float32),
            keys=pltpu.VMEM((2, self.units, self.depth), dtype),
            values=pltpu.VMEM((2, self.units, values), dtype),
            scores=pltpu.VMEM((2, self.block_rows, self.units), jnp.float32),
            shrink=pltpu.VMEM((2, self.block_rows, LANES), jnp.float32),
        )

    @property
    def row_bytes(self) -> int:
        """VMEM for a row of each place: of the scratch, and of two blocks each of q, tops and results."""
        loader, size = self.loader, self.loader.dtype.itemsize
        blocks = self.rows * LANES * 4 + self.place_rows * (loader.key_width + loader.result_width) * size
        scratch = self.scratch_shapes
        of_tile = _bytes_of((scratch.queries, scratch.top, scratch.sums))
        return (of_tile + 2 * loader.layout.num_kv_heads * blocks) // self.place_rows

    @property
    def chunk_bytes(self) -> int:
        """VMEM for the rest of the scratch."""
        scratch = self.scratch_shapes
        return _bytes_of((scratch.keys, scratch.values, scratch.scores, scratch.shrink))

    def tops_of_sinks(self, tile: int) -> jax.Array | None:
        """Tops `[Hkv, rows, 128]` of so many queries before anything is seen; None without sinks."""
        sinks = self.settings.sinks_by_row(self.loader.layout.num_kv_heads, tile)
        if sinks is None:
            return None
        return self.places.spread_sinks(jnp.pad(sinks, ((0, 0), (0, self.place_rows - sinks.shape[1]))))

    def start_tile(self, q_ref, tops_ref, scratch: TileScratch) -> None:
        """Before a tile's first chunk; `q_ref [Hkv, place_rows, key_width]`, `tops_ref` as `top` of the
        scratch.
        """
        width = self.loader.value_width
        first_total = 0.0 if self.settings.sinks is None else 1.0  # a sink counts once
        scratch.top[...] = tops_ref[...]
        scratch.sums[:, :, :width] = jnp.zeros((*scratch.sums.shape[:2], width), jnp.float32)
        scratch.sums[:, :, width:] = jnp.full(
            scratch.top.shape, first_total if self.totals_ride else first_total / LANES, jnp.float32
        )
        if self.totals_ride:
            ones = jnp.ones((*scratch.values.shape[:2], LANES), scratch.values.dtype)
            scratch.values[:, :, width:] = ones
        if self.keeps_queries:
            for head, rows in self._few_rows():
                halves = self._split(q_ref[head, rows]) if self.splits_queries else [q_ref[head, rows]]
                of_halves = zip(*(self.places.spread(half) for half in halves), strict=True)
                for of_place, kept in zip(self._of_places(rows), of_halves, strict=True):
                    scratch.queries[head, of_place] = jnp.concatenate(kept, axis=1)

    def _split(self, q: jax.Array) -> list[jax.Array]:
        """q with its factor, as two bfloat16 whose sum it is."""
        scaled = q.astype(jnp.float32) * self._query_factor
        high = scaled.astype(jnp.bfloat16)
        return [high, (scaled - high.astype(jnp.float32)).astype(jnp.bfloat16)]

    def add_chunk(self, q_ref, buffer, scratch: TileScratch, *, live, position, query, num_queries) -> None:
        """Adds the chunk in `buffer [pages, rows, 128]`, whose first slot is `position` and of which `live`
        pages were fetched, for `num_queries` queries from position `query` on.
        """
        queries = scratch.queries if self.keeps_queries else q_ref
        start, stop = self.settings.first_visible(query), query + num_queries
        tokens = buffer.shape[0] * self.loader.layout.block_size
        all_visible = (position + tokens <= query + 1) & (position >= self.settings.first_visible(stop - 1))

        def visible(block: RowBlock) -> jax.Array:
            index = lax.broadcasted_iota(jnp.int32, (1, self.units), 1)
            slot = position + self.loader.token_of(index, jnp.int32(block.place), self.units)
            row = lax.broadcasted_iota(jnp.int32, (block.size, 1), 0)
            of_query = query + (block.row - block.place * self.place_rows + row) // self.group
            return (slot <= of_query) & (slot >= self.settings.first_visible(of_query))

        @pl.when(all_visible)
        def _():
            self._add(queries, buffer, scratch, None)

        @pl.when(jnp.logical_not(all_visible))
        def _():
            clear_run(buffer, self.loader.layout, live, start - position, stop - position)
            self._add(queries, buffer, scratch, visible)

    def put_results(self, out_ref, scratch: TileScratch) -> None:
        """At the end: the results, places merged, into `out_ref [Hkv, place_rows, result_width]`."""
        for head, rows in self._few_rows():
            result = self._whole_softmax(head, rows, scratch).result()
            out_ref[head, rows] = result.astype(out_ref.dtype)

    def _few_rows(self) -> Iterator[tuple[int, slice]]:
        """KV heads, and parts of the rows of a place."""
        for head, row in product(
            range(self.loader.layout.num_kv_heads), range(0, self.place_rows, RESULT_ROWS)
        ):
            yield head, slice(row, min(row + RESULT_ROWS, self.place_rows))

    def _of_places(self, rows: slice) -> list[slice]:
        """The same rows of every place."""
        starts = range(0, self.rows, self.place_rows)
        return [slice(start + rows.start, start + rows.stop) for start in starts]

    def _whole_softmax(self, head: int, rows: slice, scratch: TileScratch) -> Softmax:
        """The softmax of some rows of a place, merged with the same rows of the other places."""
        width = self.loader.value_width
        of_places = self._of_places(rows)
        top = jnp.concatenate([scratch.top[head, rows] for rows in of_places])
        sums = jnp.concatenate([scratch.sums[head, rows] for rows in of_places])
        total = sums[:, width:]
        if not self.totals_ride:
            total = jnp.broadcast_to(total.sum(axis=1, keepdims=True), total.shape)
        return self.places.merge(Softmax(top, total, sums[:, :width]))

    def _add(
        self, queries, buffer, scratch: TileScratch, visible: Callable[[RowBlock], jax.Array] | None
    ) -> None:
        """The scores of a block are asked for before the softmax of the one before: the two overlap."""
        scales = self.loader.scales(buffer)
        blocks = list(self.blocks())

        def ask(index: int) -> None:
            block, turn = blocks[index], index % 2
            if block.row == 0:
                self._load(buffer, block.head, scratch)
            scores = self._scores(queries, block, scratch.keys[block.head % 2], scales)
            if visible is not None:
                scores = jnp.where(visible(block), scores, HIDDEN)
            old = scratch.top[block.head, block.rows]
            top = jnp.maximum(old, self._in_powers(scores.max(axis=1, keepdims=True)))
            scratch.top[block.head, block.rows] = top
            scratch.scores[turn, : block.size] = scores
            scratch.shrink[turn, : block.size] = jnp.exp2(old - top)

        def weigh(index: int) -> None:
            block, turn = blocks[index], index % 2
            scores, shrink = scratch.scores[turn, : block.size], scratch.shrink[turn, : block.size]
            top = _widened(scratch.top[block.head, block.rows], self.units)
            weights = jnp.exp2(self._in_powers(scores) - top)
            added = self._sums(weights, block, scratch.values[block.head % 2], scales)
            before = scratch.sums[block.head, block.rows]
            scratch.sums[block.head, block.rows] = before * _widened(shrink, self.sums_width) + added

        ask(0)
        for index in range(1, len(blocks)):
            ask(index)
            weigh(index - 1)
        weigh(len(blocks) - 1)

    def blocks(self) -> Iterator[RowBlock]:
        """The blocks of a tile, head by head and place by place."""
        for head, place in product(range(self.loader.layout.num_kv_heads), range(self.places.count)):
            for row in range(0, self.place_rows, self.block_rows):
                size = min(self.block_rows, self.place_rows - row)
                yield RowBlock(head, place, place * self.place_rows + row, size)

    def _load(self, buffer, head: int, scratch: TileScratch) -> None:
        """Puts K and V of a head where its products have them."""
        keys, values = self.loader.load(buffer, head, 1)
        scratch.keys[head % 2] = jnp.concatenate([keys, keys], axis=1) if self.splits_queries else keys
        scratch.values[head % 2, :, : values.shape[1]] = values

    @property
    def _query_factor(self) -> float:
        """What q times K is multiplied by, for scores in powers of two or for the softcap."""
        cap = self.settings.softcap
        return self.settings.scale * LOG2_E if cap is None else self.settings.scale / cap

    def _scores(self, queries, block: RowBlock, keys: jax.Array, scales: Scales | None) -> jax.Array:
        """The scores of a block `[size, units]` before `_in_powers`."""
        scores = lax.dot_general(
            queries[block.head, block.rows],
            keys,
            (((1,), (1,)), ((), ())),
            precision=self.loader.precision,
            preferred_element_type=jnp.float32,
        )
        if scales is not None:
            scores = scores * (scales.keys[block.place][block.head : block.head + 1] * self._query_factor)
        if self.settings.softcap is None:
            return scores
        return jnp.tanh(scores * self._query_factor if self._factor_is_missing else scores)

    @property
    def _factor_is_missing(self) -> bool:
        """Whether neither q nor scales of K have been multiplied by `_query_factor`."""
        return not self.splits_queries and not self.loader.layout.is_quantised

    def _in_powers(self, scores: jax.Array) -> jax.Array:
        """Scores of `_scores` in powers of two."""
        if self.settings.softcap is not None:
            return scores * (LOG2_E * self.settings.softcap)
        return scores * self._query_factor if self._factor_is_missing else scores

    def _sums(
        self, weights: jax.Array, block: RowBlock, values: jax.Array, scales: Scales | None
    ) -> jax.Array:
        """What a block's weights `[size, units]` add to its sums."""
        scaled = weights
        if scales is not None:
            scaled = weights * scales.values[block.place][block.head : block.head + 1]
        added = jnp.dot(
            scaled.astype(self.loader.dtype),
            values,
            precision=self.loader.precision,
            preferred_element_type=jnp.float32,
        )
        return added if self.totals_ride else jnp.concatenate([added, _lane_sums(weights)], axis=1)


def _bytes_of(shapes: Iterable[Any]) -> int:
    """Of all `shapes` of VMEM that are not None."""
    return sum(prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in shapes if x is not None)


def _widened(x: jax.Array, width: int) -> jax.Array:
    """`x [rows, 128]`, all lanes equal, for use with `[rows, width]`."""
    return x[:, :1] if width % LANES else jnp.tile(x, (1, width // LANES))


def _lane_sums(weights: jax.Array) -> jax.Array:
    """`[rows, N]` -> `[rows, 128]` whose lanes add up to the row sums; whole tiles need no shuffle."""
    rows, width = weights.shape
    if width % LANES:
        return jnp.broadcast_to(weights.sum(axis=1, keepdims=True) / LANES, (rows, LANES))
    total = weights[:, :LANES]
    for lane in range(LANES, width, LANES):
        total = total + weights[:, lane : lane + LANES]
    return total
