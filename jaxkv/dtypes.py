"""Names of element types and their sizes. The core speaks of dtypes as strings, so that it needs no jax."""

from jaxkv.errors import JaxkvError

ITEMSIZES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int32": 4,
    "uint32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element, by name."""


def itemsize(dtype: str) -> int:
    """Bytes of one element of `dtype`; JaxkvError for a name that is not in `ITEMSIZES`."""
    if not isinstance(dtype, str) or dtype not in ITEMSIZES:
        raise JaxkvError(f"unknown dtype {dtype!r}; known are {', '.join(ITEMSIZES)}")
    return ITEMSIZES[dtype]
