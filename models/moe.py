"""Mixtures of experts: each token goes through a few of many gated MLPs, and no others are computed.

Tokens are sorted by expert, so that the rows of an expert are neighbours, and each run of rows meets its own
weights: a grouped matmul. XLA has an operation for that, `jax.lax.ragged_dot_general`, which GPUs take. For a
TPU it compiles slowly where experts are many, so that TPUs take a kernel, see `grouped_matmul`. On a CPU, XLA
turns it into a product of every row with every expert; there the runs are cut into tiles of a few rows and a
loop multiplies one tile at a time with its expert's weights, so that the loop is as long as the step needs.
Measured with jax 0.12 on two AVX-512 cores that others used too, 16 experts of [2048, 1024],
milliseconds:

| rows (tokens x experts a token)     | 2    | 16  | 64  | 512  | 2048 |
|-------------------------------------|------|-----|-----|------|------|
| float32, ragged_dot                 | 199  | 232 | 384 | 1288 |      |
| float32, tiles                      | 8.6  | 20  | 32  | 137  | 198  |
| float32, the same rows, one matrix  | 1.3  | 1.8 | 4.9 | 66   | 79   |
| bfloat16, ragged_dot                | 153  | 96  | 274 | 277  |      |
| bfloat16, tiles                     | 1.1  | 6.8 | 8.7 | 17   | 50   |
| bfloat16, the same rows, one matrix | 0.25 | 0.4 | 1.8 | 6.1  | 29   |

Few rows cost what reading their experts' weights costs: the one matrix in the table is read once.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models.grouped_matmul import can_multiply, grouped_matmul

# Rows of a tile, as in the table above; more are mostly padding.
SMALLEST_TILE, LARGEST_TILE = 4, 32
_BY_EXPERT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


class Routing(NamedTuple):
    """Where each token goes: experts int32[T, k], all different, and how much each counts, float32[T, k]."""

    experts: jax.Array
    weights: jax.Array


def route(logits: jax.Array, num_chosen: int, *, renormalise: bool) -> Routing:
    """The `num_chosen` best experts of every token by softmax(logits[T, E]); `renormalise` makes their
    weights sum to 1.
    """
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), num_chosen)
    if renormalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return Routing(experts, weights)


class Experts(nnx.Module):
    """Gated MLPs, down(silu(gate(x)) * up(x)). Weights in `dtype`: gate_up[E, 2 * inner_size, hidden_size],
    gate first, and down[E, hidden_size, inner_size].
    """

    def __init__(self, num_experts: int, hidden_size: int, inner_size: int, dtype: jnp.dtype):
        self.gate_up = nnx.Param(jnp.zeros((num_experts, 2 * inner_size, hidden_size), dtype))
        self.down = nnx.Param(jnp.zeros((num_experts, hidden_size, inner_size), dtype))

    def __call__(self, x: jax.Array, routing: Routing, num_tokens: jax.Array) -> jax.Array:
        """The weighted sum [T, D] of what each token's experts make of x[T, D], in x's dtype; zeros for the
        padding tokens from `num_tokens` int32[] on.
        """
        tokens, chosen = routing.experts.shape
        num_experts = self.down.shape[0]
        is_token = jnp.arange(tokens) < num_tokens
        experts = jnp.where(is_token[:, None], routing.experts, num_experts).reshape(-1)
        order = jnp.argsort(experts, stable=True)
        rows = x[order // chosen]
        counts = jnp.bincount(experts, length=num_experts)
        out = jax.lax.platform_dependent(
            rows,
            counts,
            self.gate_up[...],
            self.down[...],
            cpu=_by_tiles,
            tpu=_by_kernel,
            default=_by_groups,
        )
        is_row = jnp.arange(len(rows)) < num_tokens * chosen
        out = jnp.where(is_row[:, None], out, 0)
        by_token = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(tokens, chosen, -1)
        return jnp.einsum("tk,tkd->td", routing.weights, by_token.astype(jnp.float32)).astype(x.dtype)


def _by_groups(rows: jax.Array, counts: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """[N, D]: rows[N, D], the first counts[0] of them through expert 0, and so on; rows after these get
    anything.
    """
    return _gated(_ragged_dot, rows, counts, gate_up, down)


def _by_kernel(rows: jax.Array, counts: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """The same by the kernel of a TPU, where it can."""

    def grouped(x: jax.Array, weights: jax.Array, counts: jax.Array) -> jax.Array:
        return (grouped_matmul if can_multiply(weights) else _ragged_dot)(x, weights, counts)

    return _gated(grouped, rows, counts, gate_up, down)


def _gated(
    product: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    rows: jax.Array,
    counts: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
) -> jax.Array:
    gate, up = jnp.split(product(rows, gate_up, counts), 2, axis=-1)
    return product(jax.nn.silu(gate) * up, down, counts)


def _ragged_dot(x: jax.Array, weights: jax.Array, counts: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot_general(x, weights, counts.astype(jnp.int32), _BY_EXPERT)


def _by_tiles(rows: jax.Array, counts: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """The same, a tile of one expert's rows at a time. A tile that is not full writes into the rows of later
    tiles, which follow.
    """
    size = _tile_rows(len(rows), len(counts))
    first_row = jnp.cumsum(counts) - counts
    tiles = -(-counts // size)
    last_tile = jnp.cumsum(tiles)
    padded = jnp.pad(rows, ((0, size), (0, 0)))

    def tile(index: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(last_tile, index, side="right")
        start = first_row[expert] + (index - last_tile[expert] + tiles[expert]) * size
        x = jax.lax.dynamic_slice_in_dim(padded, start, size)
        gate, up = jnp.split(_times(x, gate_up[expert]), 2, axis=-1)
        result = _times(jax.nn.silu(gate) * up, down[expert])
        return jax.lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    return jax.lax.fori_loop(0, last_tile[-1], tile, jnp.zeros_like(padded))[: len(rows)]


def _tile_rows(num_rows: int, num_experts: int) -> int:
    """A power of two, near the rows that an expert gets if all get as many."""
    size = SMALLEST_TILE
    while size < LARGEST_TILE and size * num_experts < num_rows:
        size *= 2
    return size


def _times(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x[N, in] times weight[out, in] transposed."""
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())))
