"""Which loader makes operands of a layer's pages."""

import jax.numpy as jnp

from pallas_kernels.layout import AttentionPageLayout
from pallas_kernels.tpu.operands import OperandLoader
from pallas_kernels.tpu.quantised import QuantisedLoader

Loader = OperandLoader | QuantisedLoader


def loader_of(layout: AttentionPageLayout, dtype: jnp.dtype, *, apart: bool = False) -> Loader:
    """The loader of `layout`'s pages, for products in `dtype` (bfloat16 or float32).

    apart: 8-bit tokens that share a row get operand rows of their own, which pays where products are long.
    """
    return QuantisedLoader(layout, dtype, apart) if layout.is_quantised else OperandLoader(layout, dtype)
