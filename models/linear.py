"""Matrix products in the form that XLA's CPU backend runs fastest, for every model.

Weights are read as `[out, in]`, the order of Hugging Face and GGUF files, so nothing is transposed on
loading, and one copy of an embedding table serves look-ups (contiguous rows) and the output matrix.

Measured with jax 0.12 on two threads of a Zen 4 (AVX-512 with bfloat16 products) and nothing else running, a
quarter of Gemma 3 270M's output matrix, 65,536 x 640 (panels of 32 outputs), milliseconds:

| rows | float32 in panels | bfloat16 x[V,D]^T | [V,D]x^T | the same in huge pages, x[V,D]^T |
|------|-------------------|-------------------|----------|----------------------------------|
| 1    | 6.0               |                   |          |                                  |
| 2    |                   | 6.5               | 8.3      | 5.9                              |
| 4    |                   | 7.7               |          | 7.4                              |
| 8    | 7.1               | 7.6 to 8.8        | 9.9      | 8.5                              |

Reading it takes 5.3 ms in float32 and 2.7 ms in bfloat16 at 32 GB/s: float32 is bound by memory, bfloat16 by
the packing that XLA's library does on every call. So: float32 in panels (`models.panels`); bfloat16 as
`[out, in]`, never one row but two (one row falls back to a scalar loop, over 100 ms), and x on the left. Its
products add up in the same order for any number of rows. An engine stores matrices so (`arrange`).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from models import panels
from models.huge_pages import in_huge_pages

# Fewest rows for which a bfloat16 product takes the fast path.
MIN_BFLOAT16_ROWS = 2


class Matrix(nnx.Param):
    """A matrix [out, in] that is only used through `linear`, `vocabulary_logits` and `look_up`, so that
    `arrange` may store it in panels."""


def arrange(model: nnx.Module, platform: str) -> None:
    """Stores the matrices of `model` anew, one after another, in the order that `platform` (JAX's name, such
    as "cpu") multiplies by fastest. Results change by rounding only; a second call changes nothing."""
    if platform != "cpu":
        return
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, Matrix):
            if _gains_from_panels(variable[...]):
                variable.set_value(jax.jit(panels.to_panels)(variable[...]))
            variable.set_value(in_huge_pages(variable[...]))


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
        _with_enough_rows(x), table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return product[: x.shape[0]]
