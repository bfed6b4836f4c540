"""Matrix products in the form that a CPU runs fastest, for every model.

Weights are read as `[out, in]`, the order of Hugging Face and GGUF files, so nothing is transposed on
loading, and one copy of an embedding table serves look-ups and the output matrix. An engine on a CPU stores
them anew (`arrange`): float32 in panels (`pallas_kernels.panels`), and bfloat16 where numba's kernel serves:
XLA's product of few bfloat16 rows repacks the matrix on every call. Of many rows XLA's is as fast on a
processor that multiplies pairs of bfloat16 and faster on others; there only the vocabulary's matrices lie in
panels, since only what is sampled from is multiplied by them. A product adds up in the same order for any
number of rows, in one form and in the other, but not alike in both: a matrix has one form for all rows.

XLA's bfloat16 products never have one row but two (one row falls back to a scalar loop, over 100 ms for
65,536 x 640), and x on the left.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from models.huge_pages import in_huge_pages
from pallas_kernels import panels
from pallas_kernels.cpu import available

# Fewest rows for which a bfloat16 product takes the fast path.
MIN_BFLOAT16_ROWS = 2


class Matrix(nnx.Param):
    """A matrix [out, in] that is only used through `linear`, `vocabulary_logits` and `look_up`, so that
    `arrange` may store it in panels."""


class VocabularyMatrix(Matrix):
    """A matrix with a row for each token, which is only multiplied by what is sampled from."""


def arrange(model: nnx.Module, platform: str) -> None:
    """Stores the matrices of `model` anew, one after another, in the order that `platform` (JAX's name, such
    as "cpu") multiplies by fastest. A matrix that lies on several devices stays as it is. Results change by
    rounding only; a second call changes nothing."""
    if platform != "cpu":
        return
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, Matrix) and len(variable[...].sharding.device_set) == 1:
            if panels.fits_panels(variable[...]) and _gains_from_panels(variable):
                variable.set_value(jax.jit(panels.to_panels)(variable[...]))
            variable.set_value(in_huge_pages(variable[...]))


def _gains_from_panels(matrix: Matrix) -> bool:
    if matrix.dtype != jnp.bfloat16:
        return True
    if available.why_not() is not None:
        return False
    return isinstance(matrix, VocabularyMatrix) or available.multiplies_bfloat16()


def _with_enough_rows(x: jax.Array) -> jax.Array:
    missing = MIN_BFLOAT16_ROWS - x.shape[0]
    if x.dtype == jnp.bfloat16 and missing > 0:
        return jnp.pad(x, ((0, missing), (0, 0)))
    return x


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x[T, in] times weight[out, in], or the same in panels, transposed: [T, out] in x's dtype."""
    if weight.ndim > 2:
        return panels.multiply(x, weight).astype(x.dtype)
    product = jax.lax.dot_general(_with_enough_rows(x), weight, (((1,), (1,)), ((), ())))
    return product[: x.shape[0]]


def look_up(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows int32[T] of table[V, D], or of the same in panels: [T, D]."""
    return panels.matrix_rows(table, rows) if table.ndim > 2 else table[rows]


def vocabulary_logits(x: jax.Array, table: jax.Array) -> jax.Array:
    """x[N, D] against every row of table[V, D], or of the same in panels: float32[N, V]."""
    if table.ndim > 2:
        return panels.multiply(x, table)
    product = jax.lax.dot_general(
        _with_enough_rows(x), table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return product[: x.shape[0]]
