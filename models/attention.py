"""Attention as most families have it: queries and keys are normed head by head, and turned, before they
meet."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.specs import AttentionSpec, FullAttentionSpec, SlidingWindowSpec
from models.causal_lm import layer_name
from models.linear import Matrix, linear
from models.norms import RMSNorm
from models.paged_cache import CacheStep, PagedCache
from models.rope import Rotation, rotate
from models.sizes import AttentionSizes


def attention_spec(
    sizes: AttentionSizes, block_size: int, dtype: str, sliding_window: int | None = None
) -> AttentionSpec:
    """What a layer keeps: keys and values in `dtype`, of a window or of everything."""
    if sliding_window is None:
        return FullAttentionSpec(
            block_size=block_size, num_kv_heads=sizes.num_kv_heads, head_size=sizes.head_size, dtype=dtype
        )
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=sizes.num_kv_heads,
        head_size=sizes.head_size,
        dtype=dtype,
        sliding_window=sliding_window,
    )


class NormedAttention(nnx.Module):
    """Grouped-query attention from x[T, hidden_size] to the same. Weights in `dtype`:
    qkv[rows, hidden_size], the rows of all queries, then keys, then values, and output.

    query_width: rows of a head's query, where a family puts more than head_size there.
    scale: of the products; None: head_size ** -0.5.
    """

    def __init__(
        self,
        sizes: AttentionSizes,
        index: int,
        hidden_size: int,
        eps: float,
        dtype: jnp.dtype,
        *,
        query_width: int | None = None,
        scale: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ):
        self.sizes, self.index = sizes, index
        self.query_width = sizes.head_size if query_width is None else query_width
        self.scale = sizes.head_size**-0.5 if scale is None else scale
        self.sliding_window, self.softcap = sliding_window, softcap
        rows = sizes.num_heads * self.query_width + 2 * sizes.num_kv_heads * sizes.head_size
        self.qkv = Matrix(jnp.zeros((rows, hidden_size), dtype))
        self.output = Matrix(jnp.zeros((hidden_size, sizes.num_heads * sizes.head_size), dtype))
        self.q_norm = RMSNorm(sizes.head_size, eps)
        self.k_norm = RMSNorm(sizes.head_size, eps)

    def __call__(self, x: jax.Array, turn: Rotation | None, cache: PagedCache) -> CacheStep:
        out, cache = self.attend(*self.project(x), turn, cache)
        return self.combine(out), cache

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q[T, Hq, query_width], k and v[T, Hkv, head_size]."""
        sizes, tokens = self.sizes, x.shape[0]
        q_rows, kv_rows = sizes.num_heads * self.query_width, sizes.num_kv_heads * sizes.head_size
        q, k, v = jnp.split(linear(x, self.qkv[...]), [q_rows, q_rows + kv_rows], axis=-1)
        return (
            q.reshape(tokens, sizes.num_heads, self.query_width),
            k.reshape(tokens, sizes.num_kv_heads, sizes.head_size),
            v.reshape(tokens, sizes.num_kv_heads, sizes.head_size),
        )

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, turn: Rotation | None, cache: PagedCache
    ) -> CacheStep:
        """Output [T, Hq, head_size]. Without `turn` positions do not count."""
        q, k = self.q_norm(q), self.k_norm(k)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        return cache.attend(
            layer_name(self.index),
            q,
            k,
            v,
            scale=self.scale,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
        )

    def combine(self, out: jax.Array) -> jax.Array:
        """[T, hidden_size] from what the heads [T, Hq, head_size] found."""
        return linear(out.reshape(out.shape[0], -1), self.output[...])
