"""The words of an attention page: the one place that knows where a token's K and V are.

A pool is `uint32[num_pages, page_rows, 128]`. Read in row-major order, the first `used_words` words of a page
hold the K and V of `block_size` tokens of one layer, the rest is padding that nobody reads:

- bfloat16: one word is (K element, V element) of one token, head and lane: `V bits << 16 | K bits`, at
  `(head * block_size + token) * head_size + lane`. A token is whole words, so writing it never reads back.
- float32: each head has a K plane followed by a V plane; the word of plane p (0 K, 1 V) is at
  `((head * 2 + p) * block_size + token) * head_size + lane`.

Heads are outermost, so `page_rows` can be sharded by KV head.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128
TILE_ROWS = 8
_PLANES = {"bfloat16": 1, "float32": 2}


class KeysValues(NamedTuple):
    """K and V of the same tokens, arrays of one shape."""

    keys: jax.Array
    values: jax.Array


@dataclass(frozen=True, kw_only=True)
class AttentionPageLayout:
    """Shape of one layer's page. Hashable, so it can be a static argument of a jitted function.

    `dtype` is "bfloat16" or "float32"; `page_rows` is the number of 128-word rows of every page of the pool,
    a multiple of 8. Raises ValueError for a value that is out of range and for a page that is too small.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    page_rows: int

    def __post_init__(self) -> None:
        for name in ("block_size", "num_kv_heads", "head_size", "page_rows"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive int, got {value!r}")
        if self.dtype not in _PLANES:
            raise ValueError(f"dtype must be one of {sorted(_PLANES)}, got {self.dtype!r}")
        if self.page_rows % TILE_ROWS:
            raise ValueError(f"page_rows must be a multiple of {TILE_ROWS}, got {self.page_rows}")
        if self.used_words > self.page_rows * LANES:
            raise ValueError(
                f"a page of {self.block_size} tokens, {self.num_kv_heads} KV heads of {self.head_size} in "
                f"{self.dtype} needs {self.used_words} words, "
                f"page_rows={self.page_rows} has {self.page_rows * LANES}"
            )

    @classmethod
    def fitting(
        cls, *, block_size: int, num_kv_heads: int, head_size: int, dtype: str
    ) -> "AttentionPageLayout":
        """The layout with the smallest page that holds it."""
        if dtype not in _PLANES:
            raise ValueError(f"dtype must be one of {sorted(_PLANES)}, got {dtype!r}")
        words = num_kv_heads * _PLANES[dtype] * block_size * head_size
        rows = -(-words // (LANES * TILE_ROWS)) * TILE_ROWS
        return cls(
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=dtype,
            page_rows=max(rows, TILE_ROWS),
        )

    @property
    def planes(self) -> int:
        """Planes a head has: 1 where K and V share a word, 2 where each has its own."""
        return _PLANES[self.dtype]

    @property
    def plane_words(self) -> int:
        """Words of one plane of one head: block_size * head_size."""
        return self.block_size * self.head_size

    @property
    def used_words(self) -> int:
        """Words of a page that hold K and V."""
        return self.num_kv_heads * self.planes * self.plane_words

    @property
    def rows_are_whole(self) -> bool:
        """Whether a token of a plane fills whole rows of 128 words (head_size is a multiple of 128)."""
        return self.head_size % LANES == 0

    def pack_tokens(self, k: jax.Array, v: jax.Array) -> jax.Array:
        """Words of new tokens: k, v `[T, Hkv, D]` of any float dtype -> `uint32[T, Hkv, planes, D]`."""
        if self.dtype == "float32":
            planes = jnp.stack([k.astype(jnp.float32), v.astype(jnp.float32)], axis=2)
            return lax.bitcast_convert_type(planes, jnp.uint32)
        low = lax.bitcast_convert_type(k.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
        high = lax.bitcast_convert_type(v.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
        return (low | (high << 16))[:, :, None, :]

    def unpack_page(self, words: jax.Array) -> KeysValues:
        """K and V of pages `uint32[..., page_rows, 128]`, float32 `[..., Hkv, block_size, D]` each."""
        lead = words.shape[:-2]
        flat = words.reshape(*lead, self.page_rows * LANES)[..., : self.used_words]
        planes = flat.reshape(*lead, self.num_kv_heads, self.planes, self.block_size, self.head_size)
        if self.dtype == "float32":
            return KeysValues(float_of(planes[..., 0, :, :]), float_of(planes[..., 1, :, :]))
        return unpack_pair(planes[..., 0, :, :])


def float_of(words: jax.Array) -> jax.Array:
    """The float32 whose bits are `words`."""
    return lax.bitcast_convert_type(words, jnp.float32)


def unpack_pair(words: jax.Array) -> KeysValues:
    """K (low half) and V (high half) of bfloat16 pairs, as float32: a bfloat16 is the top half of one."""
    return KeysValues(float_of(words << 16), float_of(words & jnp.uint32(0xFFFF0000)))
