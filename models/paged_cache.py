"""The cache as a model sees it: one array of pages, where each layer's pages are, and one batch's tables."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax

from pallas_kernels import AttentionPageLayout, GroupTable, RaggedBatch, write_and_attend
from pallas_kernels.recurrent import (
    StateLayout,
    StateTable,
    StepResult,
    causal_conv1d,
    conv_delta_rule,
    selective_scan,
    ssd,
)


class LayerPlace(NamedTuple):
    """Where a layer keeps its pages, and what is in them: its group, the slot of its first page in the group,
    and the layout of a page or of a state.
    """

    group: int
    slot: int
    layout: AttentionPageLayout | StateLayout


@dataclass(frozen=True)
class CacheLayout:
    """Everything about the cache that is fixed when the pool is made. Hashable: part of a compiled step's
    key.

    layer_places: (layer name, place) pairs.
    layer_slots: pages of one block.
    implementation: which kernels to use, by name; None chooses by platform.
    """

    layer_places: tuple[tuple[str, LayerPlace], ...]
    layer_slots: int
    implementation: str | None = None

    @cached_property
    def _place_by_name(self) -> dict[str, LayerPlace]:
        return dict(self.layer_places)

    def place(self, layer_name: str) -> LayerPlace:
        """The place of a layer; ValueError for a name that the cache was not made for."""
        try:
            return self._place_by_name[layer_name]
        except KeyError:
            known = ", ".join(self._place_by_name)
            raise ValueError(f"the cache has no layer {layer_name!r}; it has {known}") from None


CacheStep = tuple[jax.Array, "PagedCache"]
"""What a layer gets from the cache: its output, and the cache with the new pages."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """The pool during one step.

    pages: uint32[num_blocks * layer_slots, page_rows, 128].
    batch: the step's tokens and sequences, shared by all groups.
    tables: one table for each group, of blocks or of states.

    The methods raise ValueError for a layer that the cache was not made for, or of another kind.
    """

    pages: jax.Array
    batch: RaggedBatch
    tables: tuple[GroupTable | StateTable, ...]
    layout: CacheLayout = dataclasses.field(metadata={"static": True})

    @property
    def num_tokens(self) -> jax.Array:
        """int32[]: tokens of the step; those after them are padding."""
        return self.batch.query_starts[-1]

    def attend(
        self,
        layer_name: str,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> CacheStep:
        """Stores the tokens' k[T, Hkv, D] and v, then lets q[T, Hq, D] attend to all that is stored.

        Returns the attention output [T, Hq, D] in q's dtype, and the cache with the new pages.
        """
        place = self.layout.place(layer_name)
        table = self.tables[place.group]
        if not isinstance(place.layout, AttentionPageLayout) or not isinstance(table, GroupTable):
            raise ValueError(f"layer {layer_name!r} keeps a recurrent state, no keys and values")
        result = write_and_attend(
            q,
            k,
            v,
            self.pages,
            self.batch,
            table,
            layout=place.layout,
            layer_slot=place.slot,
            layer_slots=self.layout.layer_slots,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            implementation=self.layout.implementation,
        )
        return result.out, dataclasses.replace(self, pages=result.pages)

    def causal_conv1d(
        self,
        layer_name: str,
        x: jax.Array,
        weight: jax.Array,
        bias: jax.Array | None = None,
        *,
        part: int = 0,
        activation: str | None = None,
    ) -> CacheStep:
        """A causal convolution of x[T, C] by weight[C, K], with the inputs before the step from the layer's
        state; see `pallas_kernels.recurrent.causal_conv1d`. Returns [T, C] and the new cache.
        """
        operation = causal_conv1d(
            x, weight, bias, *self._inputs(layer_name), activation=activation, **self._where(layer_name, part)
        )
        return self._after(operation)

    def selective_scan(
        self,
        layer_name: str,
        x: jax.Array,
        dt: jax.Array,
        a: jax.Array,
        b: jax.Array,
        c: jax.Array,
        d: jax.Array,
        *,
        part: int = 1,
    ) -> CacheStep:
        """Mamba 1 over x, dt[T, C] from the layer's state; see `pallas_kernels.recurrent.selective_scan`.
        Returns [T, C] and the new cache.
        """
        inputs, where = self._inputs(layer_name), self._where(layer_name, part)
        return self._after(selective_scan(x, dt, a, b, c, d, *inputs, **where))

    def ssd(
        self,
        layer_name: str,
        x: jax.Array,
        dt: jax.Array,
        a: jax.Array,
        b: jax.Array,
        c: jax.Array,
        d: jax.Array | None,
        *,
        part: int = 1,
    ) -> CacheStep:
        """Mamba 2 over x[T, H, P] and dt[T, H] from the layer's state; see `pallas_kernels.recurrent.ssd`.
        Returns [T, H, P] and the new cache.
        """
        inputs, where = self._inputs(layer_name), self._where(layer_name, part)
        return self._after(ssd(x, dt, a, b, c, d, *inputs, **where))

    def conv_delta_rule(
        self,
        layer_name: str,
        x: jax.Array,
        weight: jax.Array,
        g: jax.Array,
        beta: jax.Array,
        *,
        scale: float,
        l2norm_eps: float | None = None,
        activation: str | None = None,
    ) -> CacheStep:
        """A causal convolution of x[T, C] by weight[C, K], then Gated DeltaNet of its channels, from the two
        parts of the layer's state; see `pallas_kernels.recurrent.conv_delta_rule`. Returns [T, Hv, dv] and
        the new cache.
        """
        return self._after(
            conv_delta_rule(
                x,
                weight,
                None,
                g,
                beta,
                *self._inputs(layer_name),
                parts=(0, 1),
                scale=scale,
                l2norm_eps=l2norm_eps,
                activation=activation,
                **self._layer(layer_name),
            )
        )

    def _inputs(self, layer_name: str) -> tuple[jax.Array, RaggedBatch, StateTable]:
        """What every recurrent operation takes of the pool and the step."""
        table = self.tables[self.layout.place(layer_name).group]
        if not isinstance(table, StateTable):
            raise ValueError(f"layer {layer_name!r} keeps keys and values, no recurrent state")
        return self.pages, self.batch, table

    def _where(self, layer_name: str, part: int) -> dict[str, Any]:
        """Where part number `part` of the layer's state is."""
        return {"part": part} | self._layer(layer_name)

    def _layer(self, layer_name: str) -> dict[str, Any]:
        """Where the layer's state is."""
        place = self.layout.place(layer_name)
        return {
            "layout": place.layout,
            "layer_slot": place.slot,
            "layer_slots": self.layout.layer_slots,
            "implementation": self.layout.implementation,
        }

    def _after(self, result: StepResult) -> CacheStep:
        return result.out, dataclasses.replace(self, pages=result.pages)
