"""Sizes of the decode kernel's buffers, from the shape of a layer and of a step."""

import jax.numpy as jnp

from pallas_kernels.layout import LANES, AttentionPageLayout
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.chip import vmem_capacity, vmem_limit
from pallas_kernels.tpu.decode import DecodePlan
from pallas_kernels.tpu.decode_math import DecodeMath
from pallas_kernels.tpu.new_rows import NewRows
from pallas_kernels.tpu.operands import SUBLANES
from pallas_kernels.tpu.tuning import Sizes, sizes_of

RULE = Sizes(tokens=2048, most=8)  # of a run; runs of a step
RUN_BYTES = 2 << 20
STEP_TOKENS = 8192  # of all runs of a step
STEP_BYTES = 8 << 20  # half of what the page buffers take
STEP_SHARE = 8  # of VMEM, at most one part in so many
LATENT_RULE = Sizes(tokens=2048, most=2)  # products of 640 lanes are long: few of them hide one another best
LATENT_RUN_BYTES = 4 << 20
SCALES_SHARE = 16  # of 8-bit numbers, room for one part in so many more
SEQUENCES = 64  # of one grid step: their q and results are in VMEM together
QUERY_BYTES = 2 << 20
IMAGE_BYTES = 2 << 20  # of new tokens
VMEM_SLACK = 8 << 20  # what the compiler spills, and the softmaxes


def rule_of(layout: AttentionPageLayout) -> Sizes:
    """The sizes for pages of `layout` where the table has none."""
    return LATENT_RULE if layout.latent else RULE


def plan_decode(
    settings: AttentionSettings, *, q_heads: int, dtype: jnp.dtype, rows: int, table_width: int
) -> DecodePlan:
    """The plan for `rows` sequences and tables of `table_width` entries; products are in `dtype`."""
    layout = settings.layout
    group = q_heads // layout.num_kv_heads
    maths = DecodeMath.of(settings, group, dtype)
    sizes = sizes_of("decode", settings, group, rule_of(layout))
    page_bytes = layout.used_rows * LANES * 4
    most = table_width
    if settings.span is not None:
        most = min(most, (settings.span - 2) // layout.block_size + 2)
    step_bytes = min(_with_scales(STEP_BYTES, layout), vmem_capacity() // STEP_SHARE)
    run_bytes = min(LATENT_RUN_BYTES if layout.latent else _with_scales(RUN_BYTES, layout), step_bytes)
    pages = max(min(sizes.tokens // layout.block_size, run_bytes // page_bytes, most), 1)
    pages = -(-pages // maths.loader.whole_pages) * maths.loader.whole_pages
    run_tokens, run_bytes = pages * layout.block_size, pages * page_bytes
    runs = max(min(STEP_TOKENS // run_tokens, step_bytes // run_bytes, sizes.most), 1)
    query_bytes = maths.products * maths.place_rows * maths.loader.key_width * dtype.itemsize
    image_bytes = -(-NewRows(layout).count // SUBLANES) * SUBLANES * LANES * 4
    sequences = max(min(SEQUENCES, rows, QUERY_BYTES // query_bytes, IMAGE_BYTES // image_bytes), 1)
    return DecodePlan(
        math=maths,
        sequences=sequences,
        runs=runs,
        run_pages=pages,
        table_width=table_width,
        vmem_bytes=vmem_limit(
            2 * (runs * run_bytes + 2 * sequences * query_bytes)
            + 3 * sequences * image_bytes
            + runs * run_tokens * _copied_bytes(maths)
            + VMEM_SLACK
        ),
    )


def _with_scales(size: int, layout: AttentionPageLayout) -> int:
    """`size` bytes, and those of scales beside 8-bit numbers: runs are then as long as others."""
    return size + size // SCALES_SHARE if layout.is_quantised else size


def _copied_bytes(maths: DecodeMath) -> int:
    """Bytes of VMEM for each token of a run beside its words: shifted operands and, of many rows, scores."""
    loader = maths.loader
    if loader.shifts == 1:
        return 0
    lanes = loader.layout.num_kv_heads * (loader.key_width + loader.value_width)
    return lanes * loader.dtype.itemsize + 2 * maths.products * maths.rows * 4
