"""Matrices in panels: the order in which a CPU multiplies a few rows fastest.

A matrix [out, in] becomes panels [out / width, in, width]: each holds `width` outputs side by side, one input
after another. A product keeps `width` sums in registers while a panel passes by, reads every panel once from
memory and splits panels over the cores. XLA's dot of a few rows repacks the matrix on every call instead.
"""

import jax

from pallas_kernels.choice import choose_name
from pallas_kernels.cpu import available
from pallas_kernels.xla import panels as xla

WIDTH = 64  # four AVX-512 registers of float32


def to_panels(matrix: jax.Array) -> jax.Array:
    """matrix[out, in] as panels[out / WIDTH, in, WIDTH]; WIDTH must divide out."""
    return matrix.reshape(-1, WIDTH, matrix.shape[1]).transpose(0, 2, 1)


def matrix_rows(panels: jax.Array, indices: jax.Array) -> jax.Array:
    """Rows int32[T] of the matrix: [T, in]."""
    width = panels.shape[2]
    return panels[indices // width, :, indices % width]


def multiply(x: jax.Array, panels: jax.Array, implementation: str | None = None) -> jax.Array:
    """x[T, in] times the transposed matrix: float32[T, out].

    panels: float32 or bfloat16; products and sums are float32. An output has the same bits for any number of
    rows. implementation: "numba" or "xla"; by default what serves here. Raises ValueError where x has another
    number of inputs than panels, and for an implementation that does not serve.
    """
    if panels.ndim != 3 or x.ndim != 2 or x.shape[1] != panels.shape[1]:
        raise ValueError(
            f"x{list(x.shape)} does not fit panels{list(panels.shape)}: [T, in] and [P, in, width]"
        )
    refusals = {"xla": lambda: None, "numba": lambda: available.why_not() or _refusal(panels)}
    served = f"products with panels of {panels.shape[2]} {panels.dtype}"
    if choose_name(refusals, served, implementation) == "xla":
        return xla.multiply(x, panels)
    from pallas_kernels.cpu import product

    return product.multiply(x, panels)


def _refusal(panels: jax.Array) -> str | None:
    if panels.dtype not in ("float32", "bfloat16"):
        return f"weights are {panels.dtype}, not float32 or bfloat16"
    if panels.shape[2] != WIDTH:
        return f"panels hold {panels.shape[2]} outputs, not {WIDTH}"
    return None
