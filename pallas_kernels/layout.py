"""The words of an attention page: the one place that knows where a token's K and V are.

A pool is `uint32[num_pages, page_rows, 128]`. Read in row-major order, the first `used_words` words of a page
hold the K and V of `block_size` tokens of one layer, the rest is padding that nobody reads. Each head has one
or two planes after another; a plane has the same number of words for every token, token after token:

- bfloat16: one plane, and a word is two elements. K and V of one token and lane share a word, `V bits << 16 |
  K bits`, as far as both reach; where one of them is longer, the rest of it is cut in two halves that share
  words in the same way. A token is `(head_size + head_size_v) / 2` words.
- float32: a K plane of `head_size` words a token, then a V plane of `head_size_v`.
- float8_e4m3fn, int8: a word is four elements, `V[i + D/2], V[i], K[i + D/2], K[i]` from the highest byte
  down, and a token D/2 words; K and V are of one size. Their scales (see `quantised`), float32 each, come
  after all heads: those of K, head after head and token after token, then those of V.

A latent cache keeps one vector a token, whose first `head_size_v` elements are also its V. In bfloat16 the
two halves of those share words, then the two halves of the rest; in float32 there is one plane.

No word is lost between tokens, and no two tokens share a word. Heads are outermost, so `page_rows` can be
sharded by KV head (each shard's page then holds the scales of its own heads).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantised import QUANTISED_DTYPES, numbers_of_byte, pack_bytes, quantise

LANES = 128
TILE_ROWS = 8
KEY_SCALES = 1  # of pages of 8 bits: the plane of K's scales, behind which V's lie
DTYPES = ("bfloat16", "float32", *QUANTISED_DTYPES)


class KeysValues(NamedTuple):
    """K `[..., D]` and V `[..., Dv]` of the same tokens."""

    keys: jax.Array
    values: jax.Array


@dataclass(frozen=True, kw_only=True)
class AttentionPageLayout:
    """Shape of one layer's page. Hashable, so it can be a static argument of a jitted function.

    `dtype` is one of DTYPES; `page_rows` is the number of 128-word rows of every page of the pool,
    a multiple of 8. `head_size_v` is V's size (None: `head_size`). `latent`: one vector of `head_size`
    elements a token, the first `head_size_v` of which are V. Raises ValueError for a value that is out of
    range, for sizes that are not whole words and for a page that is too small.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    page_rows: int
    head_size_v: int | None = None
    latent: bool = False

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)
        for name in ("block_size", "num_kv_heads", "head_size", "head_size_v", "page_rows"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive int, got {value!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {list(DTYPES)}, got {self.dtype!r}")
        self._check_sizes()
        if self.page_rows % TILE_ROWS:
            raise ValueError(f"page_rows must be a multiple of {TILE_ROWS}, got {self.page_rows}")
        if self.used_words > self.page_rows * LANES:
            raise ValueError(
                f"a page of {self.block_size} tokens, {self.num_kv_heads} KV heads of {self.head_size} in "
                f"{self.dtype} needs {self.used_words} words, "
                f"page_rows={self.page_rows} has {self.page_rows * LANES}"
            )

    def _check_sizes(self) -> None:
        size, size_v = self.head_size, self.value_size
        if self.latent and size_v > size:
            raise ValueError(f"head_size_v of a latent must be at most its head_size {size}, got {size_v}")
        if self.is_quantised and (self.latent or size != size_v or size % 2):
            raise ValueError(
                f"pages of {self.dtype} hold K and V of one even size, "
                f"got {'a latent of ' if self.latent else ''}{size} and {size_v}"
            )
        if self.dtype != "bfloat16":
            return
        if self.latent and (size % 2 or size_v % 2):
            raise ValueError(f"head_size and head_size_v of a latent must be even, got {size} and {size_v}")
        if (size + size_v) % 2:
            raise ValueError(f"head_size + head_size_v must be even, got {size} + {size_v}")

    @classmethod
    def fitting(
        cls,
        *,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: str,
        head_size_v: int | None = None,
        latent: bool = False,
    ) -> "AttentionPageLayout":
        """The layout with the smallest page that holds it."""
        sizes = head_size, head_size if head_size_v is None else head_size_v
        most = block_size * num_kv_heads * sum(sizes)  # words, in any dtype
        rows = -(-most // (LANES * TILE_ROWS)) * TILE_ROWS
        roomy = cls(
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=dtype,
            page_rows=max(rows, TILE_ROWS),
            head_size_v=head_size_v,
            latent=latent,
        )
        return replace(roomy, page_rows=-(-roomy.used_words // (LANES * TILE_ROWS)) * TILE_ROWS)

    @property
    def value_size(self) -> int:
        """Elements of V."""
        assert self.head_size_v is not None  # set by __post_init__
        return self.head_size_v

    @property
    def is_quantised(self) -> bool:
        """Whether elements are 8 bits, with a scale for each token's K and V beside them."""
        return self.dtype in QUANTISED_DTYPES

    @property
    def token_words(self) -> tuple[int, ...]:
        """Words of one token in each plane of a head."""
        if self.is_quantised:
            return (self.head_size // 2, 1, 1)
        if self.dtype == "float32":
            return (self.head_size,) if self.latent else (self.head_size, self.value_size)
        return ((self.head_size if self.latent else self.head_size + self.value_size) // 2,)

    @property
    def planes(self) -> int:
        """Planes a head has: 1 where K and V share words, 2 where each has its own, 3 with scales."""
        return len(self.token_words)

    @property
    def head_words(self) -> int:
        """Words of all planes of one head."""
        return self.block_size * sum(self.token_words)

    @property
    def used_words(self) -> int:
        """Words of a page that hold K and V."""
        return self.num_kv_heads * self.head_words

    @property
    def used_rows(self) -> int:
        """Rows of a page that hold K and V."""
        return -(-self.used_words // LANES)

    def first_word[N: (int, jax.Array)](self, head: N, plane: int) -> N:
        """The first word of a head's plane; token t begins `t * token_words[plane]` after it."""
        if not self.is_quantised:
            return head * self.head_words + self.block_size * sum(self.token_words[:plane])
        before = self.num_kv_heads * sum(self.token_words[:plane])
        return (before + head * self.token_words[plane]) * self.block_size

    @property
    def rows_are_whole(self) -> bool:
        """Whether a token of every plane fills whole rows of 128 words."""
        return all(size % LANES == 0 for size in self.token_words)

    def pack_tokens(self, k: jax.Array, v: jax.Array | None = None) -> tuple[jax.Array, ...]:
        """Words of new tokens, `uint32[T, Hkv, token_words[p]]` for each plane p.

        `k [T, Hkv, D]`, `v [T, Hkv, Dv]` of any float dtype; a latent has no `v`.
        """
        if self.is_quantised:
            assert v is not None  # no latents
            halves, scales = [], []
            for x in (k, v):
                small = quantise(x, self.dtype)
                halves += jnp.split(small.bits, 2, axis=-1)
                scales.append(lax.bitcast_convert_type(small.scale, jnp.uint32))
            return pack_bytes((halves[0], halves[1], halves[2], halves[3])), *scales
        elements = k if v is None else jnp.concatenate([k, v], axis=-1)
        if self.dtype == "float32":
            words = lax.bitcast_convert_type(elements.astype(jnp.float32), jnp.uint32)
            return tuple(jnp.split(words, self.token_words[:-1], axis=-1))
        bits = lax.bitcast_convert_type(elements.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
        low, high = (jnp.concatenate([bits[..., piece] for piece in half], axis=-1) for half in self.halves)
        return (low | (high << 16),)

    def strips(self, planes: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The float32 numbers in words of each plane, of any shape: `join` makes K and V of them."""
        if self.dtype == "float32":
            return tuple(float_of(words) for words in planes)
        if self.is_quantised:
            numbers = (numbers_of_byte(planes[0], byte, self.dtype) for byte in range(4))
            return *numbers, float_of(planes[1]), float_of(planes[2])
        return unpack_pair(planes[0])

    @property
    def strip_sizes(self) -> tuple[int, ...]:
        """Numbers of one token in each strip."""
        if self.is_quantised:
            return (self.head_size // 2,) * 4 + (1, 1)
        return self.token_words if self.dtype == "float32" else self.token_words * 2

    @property
    def strips_hold_values(self) -> tuple[bool, ...]:
        """Of each strip: whether some of its numbers are V's."""
        if self.latent:
            return (True,) * len(self.strip_sizes)
        if self.is_quantised:
            return (False, False, True, True, False, True)
        return (self.dtype != "float32" and self.value_size > self.head_size, True)

    def join(self, strips: Sequence[jax.Array]) -> KeysValues:
        """K `[..., D]` and V `[..., Dv]` of tokens from their strips `[..., numbers of a token]`."""
        if self.dtype == "float32":
            keys = strips[0]
            return KeysValues(keys, keys[..., : self.value_size] if self.latent else strips[1])
        if self.is_quantised:
            keys, values = jnp.concatenate(strips[:2], axis=-1), jnp.concatenate(strips[2:4], axis=-1)
            return KeysValues(keys * strips[4], values * strips[5])
        if not self.latent and self.head_size == self.value_size:
            return KeysValues(*strips)
        pieces: list[tuple[int, jax.Array]] = []
        for half, strip in zip(self.halves, strips, strict=True):
            at = 0
            for piece in half:
                size = piece.stop - piece.start
                pieces.append((piece.start, strip[..., at : at + size]))
                at += size
        elements = jnp.concatenate([x for _, x in sorted(pieces, key=lambda p: p[0])], axis=-1)
        if self.latent:
            return KeysValues(elements, elements[..., : self.value_size])
        return KeysValues(*jnp.split(elements, [self.head_size], axis=-1))

    def unpack_page(self, words: jax.Array) -> KeysValues:
        """K and V of pages `uint32[..., page_rows, 128]`, float32 `[..., Hkv, block_size, D or Dv]`."""
        lead = words.shape[:-2]
        flat = words.reshape(*lead, self.page_rows * LANES)
        planes = []
        for plane, size in enumerate(self.token_words):
            starts = (self.first_word(head, plane) for head in range(self.num_kv_heads))
            of_heads = [flat[..., start : start + self.block_size * size] for start in starts]
            planes.append(
                jnp.stack(of_heads, axis=-2).reshape(*lead, self.num_kv_heads, self.block_size, size)
            )
        return self.join(self.strips(planes))

    @property
    def halves(self) -> tuple[list[slice], list[slice]]:
        """Which of a bfloat16 token's elements (K, then V) are the low and the high halves of its words."""
        size, size_v = self.head_size, self.value_size
        if self.latent:
            paired, rest = size_v // 2, (size - size_v) // 2
            return (
                [slice(0, paired), slice(size_v, size_v + rest)],
                [slice(paired, size_v), slice(size_v + rest, size)],
            )
        rest = abs(size - size_v) // 2
        if size >= size_v:
            return [slice(0, size_v + rest)], [slice(size, size + size_v), slice(size_v + rest, size)]
        longer = slice(2 * size, 2 * size + rest), slice(2 * size + rest, size + size_v)
        return [slice(0, size), longer[0]], [slice(size, 2 * size), longer[1]]


def float_of(words: jax.Array) -> jax.Array:
    """The float32 whose bits are `words`."""
    return lax.bitcast_convert_type(words, jnp.float32)


def unpack_pair(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Low and high halves of words of two bfloat16, as float32: a bfloat16 is the top half of one."""
    return float_of(words << 16), float_of(words & jnp.uint32(0xFFFF0000))
