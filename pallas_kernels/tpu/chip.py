"""What the chip that is compiled for has."""

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

INTERPRETED_VMEM = 64 << 20
INTERPRETED_MATRIX = 256
SMALLER_FLOAT8 = ("v5e", "v5p", "v6e")


def vmem_capacity() -> int:
    """Bytes of VMEM of a core; 64 MiB where kernels are interpreted."""
    try:
        return pltpu.get_tpu_info().vmem_capacity_bytes
    except ValueError:  # jax's answer where there is no TPU
        return INTERPRETED_VMEM


def matrix_width() -> int:
    """Columns of a matrix unit: 128 up to v5, 256 after it and where kernels are interpreted."""
    try:
        return pltpu.get_tpu_info().mxu_column_size
    except ValueError:
        return INTERPRETED_MATRIX


def chip_name() -> str:
    """The chip as `TPU_TOPOLOGIES` calls it; empty where kernels are interpreted."""
    try:
        version = str(pltpu.get_tpu_info().chip_version)
    except ValueError:
        return ""
    return f"tpu{version}" if version[0].isdigit() else version


def float8_of_matrix_unit() -> jnp.dtype | None:
    """The float8 of three bits of mantissa that the matrix unit takes beside bfloat16: v4's takes none.

    That of v5 and v6 has 16 times smaller numbers for the bits of float8_e4m3fn, and NaN for its -0. Given
    the other, the compiler looks for -0 in operands and multiplies every result by 16.
    """
    chip = chip_name()
    if chip == "v4":
        return None
    return jnp.dtype(jnp.float8_e4m3b11fnuz if chip in SMALLER_FLOAT8 else jnp.float8_e4m3fn)


def vmem_limit(needed: int) -> int:
    """The limit to ask for: `needed`, but no more than the chip can give."""
    capacity = vmem_capacity()
    return min(needed, capacity - capacity // 16)
