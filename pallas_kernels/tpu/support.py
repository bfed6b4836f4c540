"""Which shapes the TPU kernels serve."""

from pallas_kernels.batch import GroupTable
from pallas_kernels.layout import LANES
from pallas_kernels.settings import AttentionSettings

TABLE_BYTES = (
    512 << 10
)  # block ids live in SMEM, which also holds the schedule and must not be filled to the brim


def refuses_on_tpu(settings: AttentionSettings, table: GroupTable) -> str | None:
    """Why the TPU kernels do not serve a layer or a table of this shape, or None."""
    layout = settings.layout
    if settings.attention_chunk_size is not None:
        return "it has chunked local attention"
    if settings.sinks is not None:
        return "it has attention sinks"
    if layout.head_size % LANES:
        return f"head_size {layout.head_size} is not a multiple of {LANES}"
    if layout.block_size % 8:
        return f"block_size {layout.block_size} is not a multiple of 8"
    size = 4 * table.block_ids.size
    if size > TABLE_BYTES:
        return f"a table of {list(table.block_ids.shape)} block ids is {size} bytes, above {TABLE_BYTES}"
    return None
