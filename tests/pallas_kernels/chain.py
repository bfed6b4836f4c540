"""A chain of layers that write and attend, as a model does, and the shapes to compile it for."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import (
    AttentionPageLayout,
    GroupTable,
    RaggedBatch,
    write_and_attend,
)


@dataclass(frozen=True, kw_only=True)
class Chain:
    """`layers` layers, every sixth full and the others of `window`, over one pool; sizes of one bucket."""

    layout: AttentionPageLayout
    layers: int
    layer_slots: int
    q_heads: int
    window: int
    tokens: int
    sequences: int
    table_width: int
    num_blocks: int
    implementation: str

    def __call__(self, pages, q, k, v, batch, tables):
        """Pool and last output; each layer's input depends on the one before."""
        out = q
        for layer in range(self.layers):
            full = layer % 6 == 5
            place = {
                "layout": self.layout,
                "layer_slot": layer % self.layer_slots,
                "layer_slots": self.layer_slots,
                "implementation": self.implementation,
            }
            keys = k + out[:, : k.shape[1]]
            seen, pages = write_and_attend(
                q + out,
                keys,
                None if self.layout.latent else v,
                pages,
                batch,
                tables[full],
                scale=0.06,
                sliding_window=None if full else self.window,
                **place,
            )
            out = q + jnp.pad(seen, ((0, 0), (0, 0), (0, q.shape[2] - seen.shape[2])))
        return pages, out

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_blocks * self.layer_slots * self.layout.page_rows * 512

    def arguments(self):
        """`jax.ShapeDtypeStruct`s for `__call__`; the pool comes first."""
        return jax.eval_shape(self._zeros)

    def _zeros(self):
        def ints(*shape: int) -> jax.Array:
            return jnp.zeros(shape, jnp.int32)

        dtype, size, rows = jnp.dtype(self.layout.dtype), self.layout.head_size, self.sequences
        tokens = (self.tokens, self.layout.num_kv_heads)
        table = GroupTable(ints(rows, self.table_width), ints(rows))
        return (
            jnp.zeros((self.num_blocks * self.layer_slots, self.layout.page_rows, 128), jnp.uint32),
            jnp.zeros((self.tokens, self.q_heads, size), dtype),
            jnp.zeros((*tokens, size), dtype),
            jnp.zeros((*tokens, self.layout.value_size), dtype),
            RaggedBatch(ints(self.tokens), ints(self.tokens), ints(rows + 1), ints(rows), ints(), ints()),
            (table, table),
        )


def gemma_270m(dtype: str, *, implementation: str, layers: int, tokens: int = 64) -> Chain:
    """Gemma 3 270M: 4 query heads, one KV head of 256, window 512, 3 layers a slot."""
    return Chain(
        layout=AttentionPageLayout.fitting(block_size=16, num_kv_heads=1, head_size=256, dtype=dtype),
        layers=layers,
        layer_slots=3,
        q_heads=4,
        window=512,
        tokens=tokens,
        sequences=8,
        table_width=64,
        num_blocks=4000,
        implementation=implementation,
    )


def gemma_27b_under_4(*, layers: int, tokens: int = 1024) -> Chain:
    """Gemma 3 27B on one of four tensor-parallel devices: 8 query heads, 4 KV heads of 128, window 1024."""
    return Chain(
        layout=AttentionPageLayout.fitting(block_size=128, num_kv_heads=4, head_size=128, dtype="bfloat16"),
        layers=layers,
        layer_slots=10,
        q_heads=8,
        window=1024,
        tokens=tokens,
        sequences=64,
        table_width=64,
        num_blocks=600,
        implementation="pallas_tpu",
    )


def of_layout(layout: AttentionPageLayout, *, q_heads: int, tokens: int = 64) -> Chain:
    """One layer of a window over pages of `layout`."""
    return Chain(
        layout=layout,
        layers=1,
        layer_slots=1,
        q_heads=q_heads,
        window=1024,
        tokens=tokens,
        sequences=16,
        table_width=64,
        num_blocks=4000,
        implementation="pallas_tpu",
    )
