"""Which shapes the TPU kernels serve."""

from pallas_kernels.batch import GroupTable
from pallas_kernels.layout import LANES
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.operands import SUBLANES
from pallas_kernels.tpu.parts import TABLE_BYTES
from pallas_kernels.tpu.places import Places

PLACED_HEAD_SIZES = (64,)  # several tokens of a head share a row of 128 words


def refuses_on_tpu(settings: AttentionSettings, table: GroupTable) -> str | None:
    """Why the TPU kernels do not serve a layer or a table of this shape, or None."""
    layout = settings.layout
    if layout.latent:
        return "the pages hold latents"
    if layout.value_size != layout.head_size:
        return f"V of {layout.value_size} differs from K of {layout.head_size}"
    if layout.head_size % LANES and layout.head_size not in PLACED_HEAD_SIZES:
        return f"head_size {layout.head_size} is not a multiple of {LANES} nor one of {PLACED_HEAD_SIZES}"
    places = Places(layout.head_size).count
    if layout.block_size % (places * SUBLANES):
        return f"block_size {layout.block_size} is not a multiple of {places * SUBLANES}"
    size = 4 * table.block_ids.shape[1]
    if size > TABLE_BYTES:
        return f"a row of {table.block_ids.shape[1]} block ids is {size} bytes, above {TABLE_BYTES}"
    return None
