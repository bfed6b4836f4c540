"""Sizes of the prefill kernel's tiles and buffers, from the shape of a layer and of a step."""

import jax.numpy as jnp

from pallas_kernels.layout import LANES
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.chip import matrix_width, vmem_capacity, vmem_limit
from pallas_kernels.tpu.loaders import Loader, loader_of
from pallas_kernels.tpu.operands import PAIRED_ROWS
from pallas_kernels.tpu.prefill import PrefillPlan
from pallas_kernels.tpu.prefill_math import PrefillMath
from pallas_kernels.tpu.tuning import Sizes, sizes_of

LEAST_TOKENS, CHUNK_TOKENS = 512, 1024  # of a chunk: where pages are large, at most
SCORE_WIDTHS = 4  # of the matrix unit: columns of a KV head's scores, at most
TILE_ROWS = 4096  # of all KV heads' scores, whose products are one long block of instructions
LEAST_ROWS = 512  # of one KV head's scores, of 16 heads or more
HEAD_ROWS = 1024  # of 4 or 8
MOST_ROWS = 2048  # of one
TILE_QUERIES = 512  # at most, as fewer cost as much
CHUNK_BYTES = 2 << 20  # of one of the two page buffers, where that is LEAST_TOKENS
CHUNK_SHARE = 8  # of VMEM, at most one part in so many for a page buffer
ROW_SHARE = 2  # and for what rows of queries take
VMEM_SLACK = 16 << 20  # what the compiler spills


def rule_of(loader: Loader) -> Sizes:
    """The sizes for pages of `loader` where the table has none.

    Scores of a KV head have a row for each query row and place that tokens have in a row of words, and a
    column for each token of a place.
    """
    places = loader.places.count
    tokens = min(CHUNK_TOKENS, SCORE_WIDTHS * matrix_width() * places)
    heads = loader.layout.num_kv_heads
    rows = min(max(TILE_ROWS // heads, HEAD_ROWS), max(2 * TILE_ROWS // heads, LEAST_ROWS), MOST_ROWS)
    return Sizes(tokens=tokens, most=rows // places)


def plan_prefill(
    settings: AttentionSettings, *, group: int, tokens: int, table_width: int, dtype: jnp.dtype
) -> PrefillPlan:
    """The plan for a step of `tokens` tokens and tables of `table_width` entries; products are in `dtype`."""
    layout = settings.layout
    loader = loader_of(layout, dtype, apart=True)
    sizes = sizes_of("prefill", settings, group, rule_of(loader))
    page_bytes = layout.used_rows * LANES * 4
    capacity = vmem_capacity()
    row_bytes = PrefillMath(settings, loader, group, PAIRED_ROWS, loader.page_units).row_bytes
    most = TILE_QUERIES
    if settings.span is not None:  # every query is scored with all that those of its tile see
        most = min(most, max(settings.span // 2, LANES))
    most = min(most, sizes.most // group, capacity // ROW_SHARE // row_bytes // group)
    tile = _even(tokens, max(most, 1))
    place_rows = -(-tile * group // PAIRED_ROWS) * PAIRED_ROWS
    chunk_bytes = min(
        max(CHUNK_BYTES, LEAST_TOKENS // layout.block_size * page_bytes), capacity // CHUNK_SHARE
    )
    pages = max(min(sizes.tokens // layout.block_size, chunk_bytes // page_bytes, table_width), 1)
    whole = loader.whole_pages
    if settings.span is None:  # of contexts, which grow
        pages = 1 << (pages.bit_length() - 1)
    else:
        pages = _even(min(-(-(settings.span - 1 + tile) // layout.block_size), table_width), pages)
        of_lanes = LANES * loader.places.count // layout.block_size
        whole = max(whole, of_lanes) if pages > of_lanes else whole
    pages = -(-pages // whole) * whole
    maths = PrefillMath(settings, loader, group, place_rows, pages * loader.page_units)
    needed = place_rows * maths.row_bytes + maths.chunk_bytes + 2 * pages * page_bytes
    return PrefillPlan(
        math=maths,
        tile=tile,
        blocks=pages,
        table_width=table_width,
        vmem_bytes=vmem_limit(needed + VMEM_SLACK),
    )


def _even(count: int, most: int) -> int:
    """The size of parts of `count`, as few as parts of `most` would be: the last is then not mostly empty."""
    return -(-count // -(-count // most))
