"""What the decode kernel computes over one run of pages: a softmax of its own, to be merged with others.

Several KV heads share one product: their K lie side by side along lanes, the rows of q of a head are zero in
the lanes of the others. A product has a row for each (place in a 128-word row, head, member of the group);
tokens that share a 128-word row are so attended apart, and merged at the end.
"""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import LANES
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.loaders import Loader, loader_of
from pallas_kernels.tpu.operands import SUBLANES
from pallas_kernels.tpu.places import Places
from pallas_kernels.tpu.quantised import Scales
from pallas_kernels.tpu.running import HIDDEN, LOG2_E, Scored, Softmax

PRODUCT_ROWS = 16  # rows that a product of bfloat16 takes at no more cost than fewer


@dataclass(frozen=True)
class DecodeMath:
    """Static half of the mathematics. `group` query heads share a KV head; products are in `dtype`.

    `scale`, `softcap` as in `AttentionSettings`.
    """

    loader: Loader
    group: int
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, settings: AttentionSettings, group: int, dtype: jnp.dtype) -> "DecodeMath":
        """The mathematics of a layer."""
        return cls(
            loader_of(settings.layout, dtype),
            group,
            settings.scale,
            settings.softcap,
        )

    @property
    def places(self) -> Places:
        """The places of tokens in a row."""
        return self.loader.places

    @cached_property
    def product_heads(self) -> int:
        """KV heads of one product: as many as its rows have room for."""
        heads, places = self.loader.layout.num_kv_heads, self.places.count
        fitting = [
            n for n in range(1, heads + 1) if heads % n == 0 and places * n * self.group <= PRODUCT_ROWS
        ]
        return max(fitting, default=1)

    @property
    def products(self) -> int:
        """Products that serve all heads."""
        return self.loader.layout.num_kv_heads // self.product_heads

    @property
    def place_rows(self) -> int:
        """Rows of q for one place in a 128-word row, padded to whole tiles."""
        return -(-self.product_heads * self.group // SUBLANES) * SUBLANES

    @property
    def rows(self) -> int:
        """Rows of a product."""
        return self.place_rows * self.places.count

    def arrange(self, q: jax.Array) -> jax.Array:
        """`q [S, Hq, D]` -> `[S, products, place_rows, key_width]`."""
        return self.places.repeat(self._by_product(q))

    def arrange_sinks(self, sinks: jax.Array) -> jax.Array:
        """Sinks `[Hq]` as tops `[products, rows, 128]`."""
        return self.places.spread_sinks(self._by_product(sinks.reshape(1, -1, 1))[0, ..., 0])

    def restore(self, out: jax.Array) -> jax.Array:
        """Results `[S, products, place_rows, result_width]` -> `[S, Hq, Dv]`."""
        size = self.loader.layout.value_size
        return out[:, :, : self.product_heads * self.group, :size].reshape(out.shape[0], -1, size)

    def scores(
        self, product: int, q: jax.Array, buffer, scales: Scales | None, position, start, stop
    ) -> Scored:
        """The scores of `q [place_rows, key_width]`, hidden but in [start, stop); `scales` of the buffer."""
        keys, values = self.loader.load(buffer, product * self.product_heads, self.product_heads)
        raw = lax.dot_general(
            self._spread(jnp.concatenate(self.places.spread(q))),
            keys,
            (((1,), (1,)), ((), ())),
            precision=self.loader.precision,
            preferred_element_type=jnp.float32,
        )
        if scales is not None:
            raw = raw * self._by_row(product, scales.keys)
        if self.softcap is None:
            scores = raw * (self.scale * LOG2_E)
        else:
            scores = jnp.tanh(raw * (self.scale / self.softcap)) * (self.softcap * LOG2_E)
        index = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        place = lax.broadcasted_iota(jnp.int32, scores.shape, 0) // self.place_rows
        slot = position + self.loader.token_of(index, place, scores.shape[1])
        shown = jnp.where((slot >= start) & (slot < stop), scores, HIDDEN)
        return Scored(shown, values, None if scales is None else self._by_row(product, scales.values))

    def softmax(self, scored: Scored) -> Softmax:
        """The softmax of a run."""
        scores, values, value_scales = scored
        top = scores.max(axis=1, keepdims=True)
        weights = jnp.exp2(scores - top)
        total = weights.sum(axis=1, keepdims=True)
        if value_scales is not None:
            weights = weights * value_scales
        spread = jnp.dot(
            weights.astype(self.loader.dtype),
            values,
            precision=self.loader.precision,
            preferred_element_type=jnp.float32,
        )
        wide = (self.rows, LANES)
        return Softmax(jnp.broadcast_to(top, wide), jnp.broadcast_to(total, wide), self._gather(spread))

    def result(self, softmax: Softmax) -> jax.Array:
        """The weighted mean `[place_rows, result_width]`; lanes from V's size on have no meaning."""
        return self.places.merge(softmax).result()

    def _by_product(self, x: jax.Array) -> jax.Array:
        """`[S, Hq, L]` -> `[S, products, place_rows, L]`."""
        used = self.product_heads * self.group
        grouped = x.reshape(x.shape[0], self.products, used, x.shape[2])
        return jnp.pad(grouped, ((0, 0), (0, 0), (0, self.place_rows - used), (0, 0)))

    def _by_row(self, product: int, scales: list[jax.Array]) -> jax.Array:
        """For each place `[all heads, N]` -> `[rows, N]`: each row of a product has its head's."""
        rows, first = [], product * self.product_heads
        for of_all in scales:
            of_place = of_all[first : first + self.product_heads]
            mine = jnp.broadcast_to(of_place[:1], (self.place_rows, of_place.shape[1]))
            head = self._head_of_row(mine.shape)
            for h in range(1, self.product_heads):
                mine = jnp.where(head == h, of_place[h : h + 1], mine)
            rows.append(mine)
        return jnp.concatenate(rows, axis=0)

    def _head_of_row(self, shape: tuple[int, ...]) -> jax.Array:
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        return row % self.place_rows // self.group

    def _spread(self, q: jax.Array) -> jax.Array:
        """`[rows, width]` -> `[rows, heads * width]`, zero in the lanes of other heads."""
        head = self._head_of_row(q.shape)
        return jnp.concatenate(
            [jnp.where(head == h, q, jnp.zeros_like(q)) for h in range(self.product_heads)], axis=1
        )

    def _gather(self, spread: jax.Array) -> jax.Array:
        """`[rows, heads * width]` -> `[rows, width]`: each row from the lanes of its head."""
        width = self.loader.value_width
        gathered = spread[:, :width]
        head = self._head_of_row(gathered.shape)
        for h in range(1, self.product_heads):
            gathered = jnp.where(head == h, spread[:, h * width : (h + 1) * width], gathered)
        return gathered
