"""Matrix products in the form that a CPU runs fastest, for every model.

Weights are read as `[out, in]`, the order of Hugging Face and GGUF files, so nothing is transposed on
loading, and one copy of an embedding table serves look-ups and the output matrix. An engine on a CPU stores
them anew (`arrange`): float32 in panels (`pallas_kernels.panels`); bfloat16 as it is, but the vocabulary's in
panels, too, where numba's kernel serves: only what is sampled from is multiplied by it, and XLA's product of
few bfloat16 rows repacks the matrix on every call. The rows of prompts are many, and XLA multiplies those in
0.6 of numba's time (1,024 of them). A product adds up in the same order for any number of rows, in one form
and in the other, but not alike in both: a matrix has one form for all rows.

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
    as "cpu") multiplies by fastest. Results change by rounding only; a second call changes nothing."""
    if platform != "cpu":
        return
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, Matrix):
            if _gains_from_panels(variable):
                variable.set_value(jax.jit(panels.to_panels)(variable[...]))
            variable.set_value(in_huge_pages(variable[...]))


def _gains_from_panels(matrix: Matrix) -> bool:
    stored = matrix[...]
    if stored.ndim != 2 or stored.shape[0] % panels.WIDTH:
        return False
    if stored.dtype == jnp.bfloat16:
        return isinstance(matrix, VocabularyMatrix) and available.why_not() is None
    return stored.dtype == jnp.float32


def _with_enough_rows(x: jax.Array) -> jax.Array:
    missing = MIN_BFLOAT16_ROWS - x.shape[0]
    if x.dtype == jnp.bfloat16 and missing > 0:
        return jnp.pad(x, ((0, missing), (0, 0)))
    return x


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x[T, in] times weight[out, in], or the same in panels, transposed: [T, out] in x's dtype."""
    if weight.ndim == 3:
        return panels.multiply(x, weight).astype(x.dtype)
    product = jax.lax.dot_general(_with_enough_rows(x), weight, (((1,), (1,)), ((), ())))
    return product[: x.shape[0]]


def look_up(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows int32[T] of table[V, D], or of the same in panels: [T, D]."""
    return panels.matrix_rows(table, rows) if table.ndim == 3 else table[rows]


def vocabulary_logits(x: jax.Array, table: jax.Array) -> jax.Array:
    """x[N, D] against every row of table[V, D], or of the same in panels: float32[N, V]."""
    if table.ndim == 3:
        return panels.multiply(x, table)
    product = jax.lax.dot_general(
        _with_enough_rows(x), table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return product[: x.shape[0]]
