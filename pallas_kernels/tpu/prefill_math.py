"""What the prefill kernel does with a chunk of pages: adds it to the running softmax of each KV head."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.layout import LANES
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.loaders import Loader
from pallas_kernels.tpu.operands import clear_run
from pallas_kernels.tpu.places import Places
from pallas_kernels.tpu.quantised import Scales
from pallas_kernels.tpu.running import HIDDEN, LOG2_E, Scored, Softmax


@dataclass(frozen=True)
class PrefillMath:
    """Static half of the mathematics. A tile has `place_rows` rows for each place in a 128-word row; row r of
    a place is query `r // group` of the tile.
    """

    settings: AttentionSettings
    loader: Loader
    group: int
    place_rows: int

    @property
    def places(self) -> Places:
        """The places of tokens in a row."""
        return self.loader.places

    @property
    def rows(self) -> int:
        """Rows of a tile of one KV head."""
        return self.place_rows * self.places.count

    def add_chunk(self, q_ref, buffer, softmax: Softmax, *, live, position, query, num_queries) -> None:
        """Adds the chunk in `buffer [pages, rows, 128]`, whose first slot is `position` and of which `live`
        pages were fetched, for `num_queries` queries from position `query` on.

        `q_ref [Hkv, rows, key_width]`. `softmax` is a `Softmax` of refs with KV heads in front, but for
        `total`, whose lanes are parts of a sum: `whole_softmax` adds them, once.
        """
        start, stop = self.settings.first_visible(query), query + num_queries
        tokens = buffer.shape[0] * self.loader.layout.block_size
        all_visible = (position + tokens <= query + 1) & (position >= self.settings.first_visible(stop - 1))

        @pl.when(all_visible)
        def _():
            self._add(q_ref, buffer, softmax, None)

        @pl.when(jnp.logical_not(all_visible))
        def _():
            clear_run(buffer, self.loader.layout, live, start - position, stop - position)
            slot, of_query = self._positions((self.rows, tokens // self.places.count))
            of_query += query
            slot += position
            visible = (slot <= of_query) & (slot >= self.settings.first_visible(of_query))
            self._add(q_ref, buffer, softmax, visible)

    def whole_softmax(self, head: int, softmax: Softmax) -> Softmax:
        """The softmax of a KV head at the end, places merged."""
        top, parts, weighted = (ref[head] for ref in softmax)
        total = jnp.broadcast_to(parts.sum(axis=1, keepdims=True), parts.shape)
        return self.places.merge(Softmax(top, total, weighted))

    def _positions(self, shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
        """Of each score: its slot in the chunk, and its query in the tile."""
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        place = row // self.place_rows
        index = lax.broadcasted_iota(jnp.int32, shape, 1)
        return self.loader.token_of(index, place, shape[1]), row % self.place_rows // self.group

    def _add(self, q_ref, buffer, softmax: Softmax, visible: jax.Array | None) -> None:
        """The scores of a head are asked for before the softmax of the one before: the two overlap."""
        heads = self.loader.layout.num_kv_heads
        scales = self.loader.scales(buffer)
        ahead = self._scores(0, q_ref, buffer, scales, visible)
        for head in range(heads):
            scored = ahead
            if head + 1 < heads:
                ahead = self._scores(head + 1, q_ref, buffer, scales, visible)
            self._accumulate(head, scored, softmax)

    @property
    def _factor(self) -> float:
        """What makes a score of `_scores` one in powers of two."""
        if self.settings.softcap is not None:
            return LOG2_E * self.settings.softcap
        return 1.0 if self.loader.layout.is_quantised else LOG2_E * self.settings.scale

    def _scores(self, head: int, q_ref, buffer, scales: Scales | None, visible: jax.Array | None) -> Scored:
        """The scores of one KV head before `_factor`: scales of K are multiplied by it, not every score."""
        keys, values = self.loader.load(buffer, head, 1)
        scores = lax.dot_general(
            q_ref[head],
            keys,
            (((1,), (1,)), ((), ())),
            precision=self.loader.precision,
            preferred_element_type=jnp.float32,
        )
        if self.settings.softcap is None:
            factor = self.settings.scale * LOG2_E
        else:
            factor = self.settings.scale / self.settings.softcap
        if scales is not None:
            scores = scores * self._by_row([x[head : head + 1] * factor for x in scales.keys])
        if self.settings.softcap is not None:
            scores = jnp.tanh(scores if scales is not None else scores * factor)
        shown = scores if visible is None else jnp.where(visible, scores, HIDDEN)
        mine = None if scales is None else self._by_row([x[head : head + 1] for x in scales.values])
        return Scored(shown, values, mine)

    def _by_row(self, scales: list[jax.Array]) -> jax.Array:
        """For each place `[1, N]` -> `[rows, N]`."""
        return jnp.concatenate([jnp.broadcast_to(x, (self.place_rows, x.shape[1])) for x in scales], axis=0)

    def _accumulate(self, head: int, scored: Scored, softmax: Softmax) -> None:
        scores, values, value_scales = scored
        top_ref, total_ref, weighted_ref = softmax
        old = top_ref[head]
        top = jnp.maximum(old, scores.max(axis=1, keepdims=True) * self._factor)
        weights = jnp.exp2(scores * self._factor - _widened(top, scores.shape[1]))
        shrink = jnp.exp2(old - top)
        top_ref[head] = top
        total_ref[head] = total_ref[head] * shrink + _lane_sums(weights)
        if value_scales is not None:
            weights = weights * value_scales
        added = jnp.dot(
            weights.astype(self.loader.dtype),
            values,
            precision=self.loader.precision,
            preferred_element_type=jnp.float32,
        )
        weighted_ref[head] = weighted_ref[head] * _widened(shrink, added.shape[1]) + added


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
