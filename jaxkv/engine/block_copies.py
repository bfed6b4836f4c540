"""Copies of blocks on the device, which the cache manager asks for where a hit ends inside a block."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxkv.copies import BlockCopies
from jaxkv.errors import JaxkvError

_BLOCKS_A_CALL = 16


class BlockCopier:
    """Copies blocks of `layer_slots` pages within the pool, in place, some at a time."""

    def __init__(self, layer_slots: int) -> None:
        self._layer_slots = layer_slots
        self._compiled: jax.stages.Compiled | None = None

    def compile(self, pages: jax.Array) -> None:
        """Compiles for the pool `pages` uint32[num_pages, page_rows, 128]. Runs nothing."""
        ids = jax.ShapeDtypeStruct((_BLOCKS_A_CALL * self._layer_slots,), jnp.int32)
        self._compiled = jax.jit(_copy_pages, donate_argnums=0).lower(pages, ids, ids).compile()

    def run(self, pages: jax.Array, copies: BlockCopies) -> jax.Array:
        """The pool after the copies; `pages` must not be used again. JaxkvError where `compile` was not
        called.

        No block is both source and target: sources hold what others computed, targets are new.
        """
        if self._compiled is None and len(copies.sources):
            raise JaxkvError(
                f"{len(copies.sources)} blocks are to be copied, but the plan says that hits end at whole "
                "blocks: make it with the cache's prefix_match_unit"
            )
        for start in range(0, len(copies.sources), _BLOCKS_A_CALL):
            part = slice(start, start + _BLOCKS_A_CALL)
            sources = self._page_ids(copies.sources[part], padding=0)
            targets = self._page_ids(copies.targets[part], padding=pages.shape[0])
            assert self._compiled is not None
            pages = self._compiled(pages, sources, targets)
        return pages

    def _page_ids(self, blocks: NDArray[np.int32], padding: int) -> NDArray[np.int32]:
        """The pages of at most _BLOCKS_A_CALL blocks, padded to as many."""
        slots = self._layer_slots
        page_ids = np.full((_BLOCKS_A_CALL, slots), padding, np.int32)
        page_ids[: len(blocks)] = blocks[:, None] * slots + np.arange(slots)
        return page_ids.reshape(-1)


def _copy_pages(pages: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """Targets past the end are dropped."""
    return pages.at[targets].set(pages[sources], mode="drop")
