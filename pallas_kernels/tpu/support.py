"""Which shapes the TPU kernels serve."""

from pallas_kernels.batch import GroupTable
from pallas_kernels.layout import LANES, AttentionPageLayout

TABLE_BYTES = (
    512 << 10
)  # block ids live in SMEM, which also holds the schedule and must not be filled to the brim


def refuses_on_tpu(layout: AttentionPageLayout, table: GroupTable) -> str | None:
    """Why the TPU kernels do not serve a layout or a table of this shape, or None."""
    if layout.head_size % LANES:
        return f"head_size {layout.head_size} is not a multiple of {LANES}"
    if layout.block_size % 8:
        return f"block_size {layout.block_size} is not a multiple of 8"
    size = 4 * table.block_ids.size
    if size > TABLE_BYTES:
        return f"a table of {list(table.block_ids.shape)} block ids is {size} bytes, above {TABLE_BYTES}"
    return None
