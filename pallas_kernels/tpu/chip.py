"""What the chip that is compiled for has."""

from jax.experimental.pallas import tpu as pltpu

INTERPRETED_VMEM = 64 << 20
INTERPRETED_MATRIX = 256


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


def multiplies_float8() -> bool:
    """Whether the matrix unit takes float8 beside bfloat16: v4's does not."""
    return chip_name() != "v4"


def vmem_limit(needed: int) -> int:
    """The limit to ask for: `needed`, but no more than the chip can give."""
    capacity = vmem_capacity()
    return min(needed, capacity - capacity // 16)
