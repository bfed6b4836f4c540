"""The bytes that an attention kernel has to move between HBM and VMEM, from what a case says alone.

Counted are, at their real sizes (no padding of lanes, rows or pages):

- K and V, and the scales of 8-bit ones, of every token that some query of a tile sees, once for each tile; a
  tile is the queries of one sequence whose softmaxes are in VMEM together, a decode's its only one
- q and the results
- new tokens' K and V, read and written, where the kernel writes them

Tables and lengths (4 bytes a page) are scalars put into SMEM before the kernel starts, which no tool counts.
"""

from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from kernel_cases import Case

SCALE_BYTES = 4


class Tiles(Protocol):
    """First query and number of queries of each tile, `[N]` each."""

    @property
    def position(self) -> Any: ...
    @property
    def num_queries(self) -> Any: ...


def needed_bytes(case: Case, tiles: Tiles | None = None) -> int:
    """Of all the case's tiles; without `tiles`, where each sequence's queries are one tile: no kernel can
    move less.
    """
    if tiles is None:
        position, num_queries = np.full(case.sequences, case.context - case.new), case.new
    else:
        position, num_queries = np.asarray(tiles.position), np.asarray(tiles.num_queries)
    seen = int((position + num_queries - _first_seen(case, position)).sum())
    queries = case.sequences * case.new
    size_v = case.head_size if case.head_size_v is None else case.head_size_v
    moved = seen * _token_bytes(case, case.dtype)
    moved += queries * case.q_heads * (case.head_size + size_v) * case.activation_dtype.itemsize
    if case.writes:
        new = (case.activation_dtype.name, case.dtype)
        moved += queries * sum(_token_bytes(case, dtype) for dtype in new)
    return moved


def _first_seen(case: Case, position: Any) -> Any:
    """The first position that a query at `position` sees."""
    if case.window is not None:
        return np.maximum(position + 1 - case.window, 0)
    return position * 0 if case.chunk is None else position - position % case.chunk


def _token_bytes(case: Case, dtype: str) -> int:
    """K and V of one token and all heads in `dtype`; a latent is both at once."""
    size_v = case.head_size if case.head_size_v is None else case.head_size_v
    vectors = (case.head_size,) if case.latent else (case.head_size, size_v)
    itemsize = jnp.dtype(dtype).itemsize
    scale = SCALE_BYTES if itemsize == 1 else 0
    return case.kv_heads * sum(size * itemsize + scale for size in vectors)
