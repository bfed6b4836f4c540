"""Matrix products in the form that XLA's CPU backend runs fastest, for every model.

Weights are read as `[out, in]`, the order of Hugging Face and GGUF files, so nothing is transposed on
loading, and one copy of an embedding table serves look-ups (contiguous rows) and the output matrix.

Measured with jax 0.12 on two busy AVX-512/AMX cores, 18 layers of Gemma 3 270M (100 M weights), milliseconds:

| rows | float32 x[in,out] | float32 x[out,in]^T | bfloat16 x[in,out] | bfloat16 x[out,in]^T |
|------|-------------------|---------------------|--------------------|----------------------|
| 1    | 28.8              | 16.2                | 201                | 121                  |
| 1 padded to 2, 4, 8 | 47, 55, 93 | 27, 27, 33    | 34, 36, 24         | 14, 12, 15           |
| 8    | 60                | 38                  | 27                 | 17                   |

and the output matrix of 262,144 x 640:

| rows | float32 x[D,V] | x[V,D]^T | [V,D]x^T | bfloat16 x[D,V] | x[V,D]^T | [V,D]x^T |
|------|----------------|----------|----------|-----------------|----------|----------|
| 1    | 22             | 27       | 28       | 230             | 197      | 216      |
| 2    | 41             | 41       | 31       | 31              | 35       | 24       |
| 4    | 54             | 45       | 36       | 55              | 21       | 13       |
| 8    | 82             | 48       | 43       | 37              | 24       | 16       |

So: `[out, in]`, and bfloat16 is padded to four rows (one row falls back to a scalar loop). The vocabulary is
computed with the matrix on the left. What that gives is [V, N]: a consumer that reduces `logits.T` over its
first axis gets it as it is (bfloat16, 8 rows, with the largest found: 1.4 times faster), one that wants rows
pays for the transposition, which makes it the same as x[V,D]^T. Float32 is faster still in panels
(`models.panels`); bfloat16 is not: its products there are in float32. An engine stores matrices so
(`arrange`).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from models import panels

# Fewest rows for which a bfloat16 product takes the fast path.
MIN_BFLOAT16_ROWS = 4


class Matrix(nnx.Param):
    """A matrix [out, in] that is only used through `linear`, `vocabulary_logits` and `look_up`, so that
    `arrange` may store it in panels."""


def arrange(model: nnx.Module, platform: str) -> None:
    """Stores the matrices of `model` anew, one after another, in the order that `platform` (JAX's name, such
    as "cpu") multiplies by fastest. Results change by rounding only; a second call changes nothing."""
    if platform != "cpu":
        return
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, Matrix) and _gains_from_panels(variable[...]):
            variable.set_value(jax.jit(panels.to_panels)(variable[...]))


def _gains_from_panels(stored: jax.Array) -> bool:
    return stored.ndim == 2 and stored.dtype == jnp.float32 and stored.shape[0] % panels.WIDTH == 0


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
        table, _with_enough_rows(x), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return product[:, : x.shape[0]].T
