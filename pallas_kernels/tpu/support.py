"""Which shapes the TPU kernels serve."""

import jax.numpy as jnp

from pallas_kernels.batch import GroupTable
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.operands import SUBLANES, OperandLoader
from pallas_kernels.tpu.parts import TABLE_BYTES

PAGE_DTYPES = ("bfloat16", "float32")
SMALLEST_HEAD = 8


def refuses_on_tpu(settings: AttentionSettings, table: GroupTable) -> str | None:
    """Why the TPU kernels do not serve a layer or a table of this shape, or None."""
    layout = settings.layout
    if layout.dtype not in PAGE_DTYPES:
        return f"pages of {layout.dtype} are not among {', '.join(PAGE_DTYPES)}"
    size, size_v = layout.head_size, layout.value_size
    if size % SMALLEST_HEAD or size_v % SMALLEST_HEAD:
        return f"head sizes {size} and {size_v} of K and V are not multiples of {SMALLEST_HEAD}"
    loader = OperandLoader(layout, jnp.dtype(layout.dtype))
    if (reason := loader.joining.refuses) is not None:
        return reason
    together = loader.places.count * loader.shifts * SUBLANES
    if layout.block_size % together:
        return f"block_size {layout.block_size} is not a multiple of {together}"
    row_bytes = 4 * table.block_ids.shape[1]
    if row_bytes > TABLE_BYTES:
        return f"a row of {table.block_ids.shape[1]} block ids is {row_bytes} bytes, above {TABLE_BYTES}"
    return None
