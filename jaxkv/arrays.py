"""Arrays that grow."""

import numpy as np
from numpy.typing import NDArray


def grown(array: NDArray, shape: tuple[int, ...], fill: int | None = 0) -> NDArray:
    """A larger copy of `array`; new elements are `fill` (None: left uninitialised)."""
    new = np.empty(shape, array.dtype) if fill is None else np.full(shape, fill, array.dtype)
    new[tuple(slice(0, n) for n in array.shape)] = array
    return new
