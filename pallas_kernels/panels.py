"""Matrices in panels: the order in which a CPU multiplies a few rows fastest.

A float32 matrix [out, in] becomes panels [out / width, in, width]: each holds `width` outputs side by side,
one input after another. A bfloat16 matrix becomes [out / width, in / 2, width, 2]: two inputs after another.
A product keeps `width` sums in registers while a panel passes by, reads every panel once from memory and
splits panels over the cores. XLA's dot of a few rows repacks the matrix on every call instead.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.choice import choose_name
from pallas_kernels.cpu import available
from pallas_kernels.xla import panels as xla

WIDTH = 64  # four AVX-512 registers of float32


def fits_panels(matrix: jax.Array) -> bool:
    """Whether matrix[out, in] can lie in panels."""
    if matrix.ndim != 2 or matrix.shape[0] % WIDTH:
        return False
    return matrix.dtype == jnp.float32 or (matrix.dtype == jnp.bfloat16 and matrix.shape[1] % 2 == 0)


def to_panels(matrix: jax.Array) -> jax.Array:
    """matrix[out, in], which `fits_panels`, as panels."""
    if matrix.dtype == jnp.bfloat16:
        return matrix.reshape(-1, WIDTH, matrix.shape[1] // 2, 2).transpose(0, 2, 1, 3)
    return matrix.reshape(-1, WIDTH, matrix.shape[1]).transpose(0, 2, 1)


def matrix_rows(panels: jax.Array, indices: jax.Array) -> jax.Array:
    """Rows int32[T] of the matrix: [T, in]."""
    width = panels.shape[2]
    return panels[indices // width, :, indices % width].reshape(indices.shape[0], -1)


def multiply(x: jax.Array, panels: jax.Array, implementation: str | None = None) -> jax.Array:
    """x[T, in] times the transposed matrix: float32[T, out].

    panels: of a float32 or bfloat16 matrix, perhaps given another type since; sums are float32. An output has
    the same bits for any number of rows. implementation: "numba" or "xla"; by default what serves here.
    Raises ValueError where x has another number of inputs than panels, and for an implementation that does
    not serve.
    """
    if x.ndim != 2 or panels.ndim not in (3, 4) or x.shape[1] != panels.shape[1] * (panels.ndim - 2):
        raise ValueError(
            f"x{list(x.shape)} does not fit panels{list(panels.shape)}: "
            "[T, in] and [P, in, width] or [P, in / 2, width, 2]"
        )
    if panels.ndim == 4 and not x.dtype == panels.dtype == jnp.bfloat16:
        panels = _without_pairs(panels)
    refusals = {"xla": lambda: None, "numba": lambda: available.why_not() or _refusal(panels)}
    served = f"products with panels of {panels.shape[2]} {panels.dtype}"
    if choose_name(refusals, served, implementation) == "xla":
        return xla.multiply(x, _without_pairs(panels) if panels.ndim == 4 else panels)
    from pallas_kernels.cpu import product

    return product.multiply(x if panels.ndim == 4 else x.astype(jnp.float32), panels)


def _without_pairs(panels: jax.Array) -> jax.Array:
    """Panels of pairs as float32[P, in, width]."""
    return panels.swapaxes(2, 3).reshape(panels.shape[0], -1, panels.shape[2]).astype(jnp.float32)


def _refusal(panels: jax.Array) -> str | None:
    if panels.ndim == 3 and panels.dtype != jnp.float32:
        return f"weights are {panels.dtype}, neither float32 nor pairs of bfloat16"
    if panels.shape[2] != WIDTH:
        return f"panels hold {panels.shape[2]} outputs, not {WIDTH}"
    return None
