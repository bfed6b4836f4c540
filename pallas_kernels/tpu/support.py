"""Which shapes the TPU kernels serve."""

import jax.numpy as jnp

from pallas_kernels.batch import GroupTable
from pallas_kernels.choice import Queries
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.loaders import loader_of
from pallas_kernels.tpu.parts import TABLE_BYTES


def refuses_on_tpu(settings: AttentionSettings, table: GroupTable, q: Queries | None = None) -> str | None:
    """Why the TPU kernels do not serve a layer or a table of this shape, or None. Any queries are served."""
    del q
    layout = settings.layout
    products = jnp.dtype("float32" if layout.dtype == "float32" else "bfloat16")
    if (reason := loader_of(layout, products).refuses) is not None:
        return reason
    row_bytes = 4 * table.block_ids.shape[1]
    if row_bytes > TABLE_BYTES:
        return f"a row of {table.block_ids.shape[1]} block ids is {row_bytes} bytes, above {TABLE_BYTES}"
    return None
