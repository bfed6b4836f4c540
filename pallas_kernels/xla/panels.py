"""Products with matrices in panels, as a sum over inputs that XLA's CPU backend keeps in registers.

Processor time of products with a matrix of 16,384 x 640, milliseconds, by width (the shortest of 24 runs
beside other work):

| rows       | 2    | 4    | 8    | 16   | 32   |
|------------|------|------|------|------|------|
| 32 outputs | 2.53 | 2.44 | 3.49 | 5.22 | 9.38 |
| 64 outputs | 2.11 | 2.00 | 2.98 | 4.49 | 9.38 |

One row takes as long at both widths (it waits for memory), 64 and 256 rows a seventh less at 64. Panels of
128 outputs take about twice as long.
"""

import jax
import jax.numpy as jnp

ROWS_AT_ONCE = 256  # rows that stay in a core's cache while it passes over the panels
MANY_ROWS = 64  # from here on a product is put in order by itself, see `multiply`


def multiply(x: jax.Array, panels: jax.Array) -> jax.Array:
    """x[T, in] times the transposed matrix: float32[T, out]."""
    rows = x.shape[0]
    tiles = -(-rows // ROWS_AT_ONCE)
    tile = -(-rows // tiles)
    x = jnp.pad(x, ((0, tiles * tile - rows), (0, 0))).reshape(tiles, tile, -1)
    # The barrier keeps what computes x out of the loop, where it would run again for every panel.
    x = jax.lax.optimization_barrier(x)[:, None, :, :, None].astype(jnp.float32)
    product = jnp.sum(x * panels[None, :, None].astype(jnp.float32), axis=3)
    product = product.transpose(0, 2, 1, 3).reshape(tiles * tile, -1)[:rows]
    # What follows would be computed while the product is put in order, panel by panel and not vectorised: the
    # activation of an MLP's 1,024 rows of 2,048 takes 15 ms that way, 5 ms in rows, the copy included.
    return jax.lax.optimization_barrier(product) if rows >= MANY_ROWS else product
