"""Arrays of shared memory, laid out so that TMA and tensor cores read them without bank conflicts."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE_LANES, FEWEST_LANES = 32, 16  # elements of a swizzled row: at most, at least


def swizzled(shape: tuple[int, ...], dtype: Any, lanes: int = TILE_LANES) -> Any:
    """Scratch memory in swizzled tiles of 8 rows and `lanes` elements: 8 rows or a tile's columns can be read
    alone.
    """
    # The stubs take both transforms for abstract classes.
    tiles: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    size = jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(tiles((8, lanes)), swizzle(lanes * size)))
