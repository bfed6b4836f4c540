"""Rows that are sorted by group, each group times a matrix of its own, on a TPU: `megablox`' kernel from JAX.

It walks a grid of (columns, visits, inner), where a visit is one tile of rows for one group: a tile that
several groups share is visited once by each. Tile sizes follow from the shapes alone: the cheapest that
fit the memory of the core, as `choose_tiles` counts.

A TPU keeps matrices with the axis last that makes whole rows of lanes. The kernel reads either way; where
neither axis does, all weights would be copied at every call (`can_multiply`).
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

DTYPES = ("bfloat16", "float32")  # what the kernel takes
LANES = 128
SUBLANES = 16  # of a 16-bit type; a multiple of what a 32-bit type needs
ROWS = (128, 256, 512)  # of a tile: fewer leave the matrix unit idle, more are mostly masked
# A kernel that asks for no more gets 16 MiB or more; the rest is for what the compiler keeps itself.
MEMORY_BYTES = 12 * 2**20
# What could be read while the next step of the grid starts, about a third of a microsecond.
STEP_BYTES = 2**19
# Of the matrix units in bfloat16 while one byte is read: v5e has 240, v6e 560.
OPERATIONS_PER_BYTE = 400
_FLOAT32_BYTES = 4


class Tiles(NamedTuple):
    """Rows, elements summed over and columns of one step; what `megablox` calls m, k and n."""

    rows: int
    inner: int
    columns: int


def can_multiply(weights: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a TPU keeps weights[G, columns, inner] as the kernel reads them, in a dtype that it takes."""
    return weights.dtype in DTYPES and any(size % LANES == 0 for size in weights.shape[1:])


def grouped_matmul(
    x: jax.Array, weights: jax.Array, counts: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """[N, columns], in x's dtype: x[N, inner], the first counts[0] rows times weights[0] transposed, and so
    on; rows after these get anything. weights[G, columns, inner] and x are of one of `DTYPES`; sums are in
    float32. `interpret` runs the kernel where there is no TPU.
    """
    num_rows, inner = x.shape
    groups, columns, _ = weights.shape
    tiles = choose_tiles(num_rows, inner, columns, groups=groups, itemsize=weights.dtype.itemsize)
    padded = jnp.pad(x, ((0, -num_rows % tiles.rows), (0, 0)))
    sums_are_last = inner % LANES == 0 or columns % LANES > 0
    out = gmm(
        padded,
        weights if sums_are_last else weights.swapaxes(1, 2),
        counts.astype(jnp.int32),
        x.dtype,
        tiles,
        transpose_rhs=sums_are_last,
        interpret=interpret,
    )
    return out[:num_rows]


def choose_tiles(num_rows: int, inner: int, columns: int, *, groups: int, itemsize: int) -> Tiles:
    """The cheapest tiles, by `_cost`, of those that fit `MEMORY_BYTES`.

    The smallest, one row of lanes each way, fit whatever the shapes.
    """
    all_rows = _round_up(num_rows, SUBLANES)
    row_tiles = sorted({min(rows, all_rows) for rows in ROWS})
    fitting = (
        tiles
        for tiles in (Tiles(*sizes) for sizes in product(row_tiles, _parts(inner), _parts(columns)))
        if _memory_bytes(tiles, inner, itemsize) <= MEMORY_BYTES
    )
    return min(fitting, key=lambda tiles: _cost(tiles, num_rows, inner, columns, groups, itemsize))


def _parts(size: int) -> Iterator[int]:
    """`size`, about a half of it, a quarter and so on; all but the whole are whole rows of lanes."""
    yield size
    parts = 2
    while size > LANES * parts // 2:
        yield _round_up(-(-size // parts), LANES)
        parts *= 2


def _memory_bytes(tiles: Tiles, inner: int, itemsize: int) -> int:
    """Two buffers of everything, a sum and a product in float32, and float32 copies of the operands where
    the last part of the sum is masked."""
    operands = (tiles.rows + tiles.columns) * tiles.inner
    results = tiles.rows * tiles.columns
    masked = operands if inner % tiles.inner else 0
    return 2 * (operands + results) * itemsize + (2 * results + masked) * _FLOAT32_BYTES


def _cost(tiles: Tiles, num_rows: int, inner: int, columns: int, groups: int, itemsize: int) -> int:
    """Bytes that are read, and that could be read during the products and the starts of steps. Every group
    has rows where there are enough. What the last step used is not read again, which helps only where the sum
    is in one part.
    """
    row_tiles, sums, column_tiles = (
        -(-size // tile) for size, tile in zip((num_rows, inner, columns), tiles, strict=True)
    )
    busy = min(groups, num_rows)
    visits = row_tiles + busy - 1
    x_tiles, matrices = (row_tiles, busy) if sums == 1 else (visits, visits)
    elements = column_tiles * x_tiles * tiles.rows * inner + matrices * inner * columns
    operations = 2 * visits * tiles.rows * inner * columns
    steps = column_tiles * visits * sums
    return elements * itemsize + operations // OPERATIONS_PER_BYTE + steps * STEP_BYTES


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
