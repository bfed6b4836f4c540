"""Sizes of the prefill kernel's tiles and buffers, from the shape of a layer and of a step."""

import jax.numpy as jnp

from pallas_kernels.layout import LANES
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.chip import vmem_capacity, vmem_limit
from pallas_kernels.tpu.loaders import loader_of
from pallas_kernels.tpu.operands import PAIRED_ROWS
from pallas_kernels.tpu.prefill import PrefillPlan
from pallas_kernels.tpu.prefill_math import PrefillMath
from pallas_kernels.tpu.tuning import Sizes, sizes_of

RULE = Sizes(tokens=512, most=512)  # of a chunk; query rows (tokens x group) of a tile and KV head, at most
CHUNK_BYTES = 2 << 20  # of one of the two page buffers
TILE_SHARE = 8  # of VMEM, at most one part in so many for the softmaxes of a tile
VMEM_SLACK = 16 << 20  # what the compiler spills


def plan_prefill(
    settings: AttentionSettings, *, group: int, tokens: int, table_width: int, dtype: jnp.dtype
) -> PrefillPlan:
    """The plan for a step of `tokens` tokens and tables of `table_width` entries; products are in `dtype`."""
    layout = settings.layout
    sizes = sizes_of("prefill", settings, group, RULE)
    loader = loader_of(layout, dtype, apart=True)
    page_bytes = layout.used_rows * LANES * 4
    row_bytes = layout.num_kv_heads * loader.places.count * (loader.value_width + 2 * LANES) * 4
    tile = max(1, min(sizes.most // group, vmem_capacity() // TILE_SHARE // row_bytes // group, tokens))
    pages = max(min(sizes.tokens // layout.block_size, CHUNK_BYTES // page_bytes, table_width), 1)
    pages = -(-pages // loader.whole_pages) * loader.whole_pages
    place_rows = -(-tile * group // PAIRED_ROWS) * PAIRED_ROWS
    return PrefillPlan(
        math=PrefillMath(settings, loader, group, place_rows),
        tile=tile,
        blocks=pages,
        table_width=table_width,
        vmem_bytes=vmem_limit(2 * pages * page_bytes + 4 * place_rows * row_bytes + VMEM_SLACK),
    )
