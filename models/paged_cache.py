"""The cache as a model sees it: one array of pages, where each layer's pages are, and one batch's tables."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax

from pallas_kernels import AttentionPageLayout, GroupTable, RaggedBatch, paged_attention, write_kv


class LayerPlace(NamedTuple):
    """Where a layer keeps its pages: its group and its slot in the group."""

    group: int
    slot: int


@dataclass(frozen=True)
class CacheLayout:
    """Everything about the cache that is fixed when the pool is made. Hashable: part of a compiled step's
    key.

    layer_places: (layer name, place) pairs.
    page_layouts: how each group's page is laid out.
    layer_slots: pages of one block.
    implementation: which kernels to use, by name; None chooses by platform.
    """

    layer_places: tuple[tuple[str, LayerPlace], ...]
    page_layouts: tuple[AttentionPageLayout, ...]
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """The pool during one step.

    pages: uint32[num_blocks * layer_slots, page_rows, 128].
    batch: the step's tokens and sequences, shared by all groups.
    tables: one block table for each group.
    """

    pages: jax.Array
    batch: RaggedBatch
    tables: tuple[GroupTable, ...]
    layout: CacheLayout = dataclasses.field(metadata={"static": True})

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
    ) -> "tuple[jax.Array, PagedCache]":
        """Stores the tokens' k[T, Hkv, D] and v, then lets q[T, Hq, D] attend to all that is stored.

        Returns the attention output [T, Hq, D] in q's dtype, and the cache with the new pages.
        """
        place = self.layout.place(layer_name)
        where = {
            "layout": self.layout.page_layouts[place.group],
            "layer_slot": place.slot,
            "layer_slots": self.layout.layer_slots,
        }
        table = self.tables[place.group]
        pages = write_kv(self.pages, k, v, self.batch, table, **where)
        out = paged_attention(
            q,
            pages,
            self.batch,
            table,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            implementation=self.layout.implementation,
            **where,
        )
        return out, dataclasses.replace(self, pages=pages)
