"""Arrays of shared memory, laid out so that TMA and tensor cores read them without bank conflicts."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE_LANES = 32


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Scratch memory in swizzled tiles of 8 rows and 32 elements: 8 rows or 32 columns can be read alone."""
    # The stubs take both transforms for abstract classes.
    tiles: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    size = jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(tiles((8, TILE_LANES)), swizzle(TILE_LANES * size)))
