"""The words of a recurrent state: the one place that knows where its parts are.

A state has parts (a convolution's last inputs, a matrix for each head) that lie over one or more pages of
`uint32[page_rows, 128]`, one page after the other.

The last axis of a part's shape is the one that a step sums over; the axes before it are channels. Channels go
on lanes, so a part `[*channels, size]` is stored as `[blocks, size, lanes]` in row-major order, channel
`block * lanes + lane`:

- `[C, size]` (convolutions, Mamba 1): one block, lanes = C;
- `[H, P, size]` (Mamba 2, gated DeltaNet): a block is a head, or as many heads as fill 128 lanes if they
  divide evenly;
- `[C]`: one block of size 1.

float32: word i is element i. bfloat16: a word is two elements of different runs, the first run in the low
halves and the second in the high ones, so that unpacking never moves a lane. Pairs of runs follow each other.
A run is a block if there is an even number of them, else the lanes of one row if there is an even number of
rows, else half of them; else half of the part, rounded up.

The largest part comes first. A part starts on a tile (8 rows of 128 words) if that leaves room for all, else
on a row, else on the next word. What is left of the last page is never read or written.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import LANES, TILE_ROWS, unpack_pair

_BYTES = {"bfloat16": 2, "float32": 4}


class StoredShape(NamedTuple):
    """A part as it is stored: `[blocks, size, lanes]`, `size` being the axis that a step sums over."""

    blocks: int
    size: int
    lanes: int


class PartWords(NamedTuple):
    """Words [start, start + size) of a state's pages, counted from its first page's first word."""

    start: int
    size: int

    @property
    def are_rows(self) -> bool:
        """Whether they are whole rows of 128 words."""
        return self.start % LANES == 0 and self.size % LANES == 0


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """Parts of a state and their pages. Hashable, so it can be a static argument of a jitted function.

    shapes, dtypes: the parts, as a `MambaSpec` has them: a convolution `[C, kernel - 1]`, Mamba 1
    `[C, state]`, Mamba 2 `[H, P, state]`, gated DeltaNet `[Hv, dv, dk]`; dtypes "float32" or "bfloat16".
    page_rows: 128-word rows of every page of the pool, a multiple of 8.
    Raises ValueError for anything else.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    page_rows: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", tuple(tuple(shape) for shape in self.shapes))
        object.__setattr__(self, "dtypes", tuple(self.dtypes))
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise ValueError(
                f"a state needs as many shapes as dtypes, and one: got {self.shapes}, {self.dtypes}"
            )
        for shape in self.shapes:
            if not 1 <= len(shape) <= 3 or any(not isinstance(size, int) or size < 1 for size in shape):
                raise ValueError(f"a part of a state has 1 to 3 axes of positive size, got {shape}")
        for dtype in self.dtypes:
            if dtype not in _BYTES:
                raise ValueError(f"the dtype of a state must be one of {sorted(_BYTES)}, got {dtype!r}")
        if not isinstance(self.page_rows, int) or self.page_rows < 1 or self.page_rows % TILE_ROWS:
            raise ValueError(f"page_rows must be a positive multiple of {TILE_ROWS}, got {self.page_rows!r}")

    @property
    def page_words(self) -> int:
        """Words of a page."""
        return self.page_rows * LANES

    @property
    def num_pages(self) -> int:
        """Pages of one state of one layer."""
        return -(-sum(self._counts) // self.page_words)

    @property
    def num_parts(self) -> int:
        """Parts of a state."""
        return len(self.shapes)

    @property
    def _counts(self) -> tuple[int, ...]:
        """Words of each part."""
        return tuple(
            -(-prod(shape) * _BYTES[dtype] // 4)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @cached_property
    def parts(self) -> tuple[PartWords, ...]:
        """Where each part is."""
        room = self.num_pages * self.page_words
        for unit in (TILE_ROWS * LANES, LANES):
            placed = self._place(unit)
            if max(part.start + part.size for part in placed) <= room:
                return placed
        return self._place(1)

    def _place(self, unit: int) -> tuple[PartWords, ...]:
        """Parts one after the other, the largest first, each on the next multiple of `unit` words."""
        placed: dict[int, PartWords] = {}
        end = 0
        for index in sorted(range(self.num_parts), key=lambda i: -self._counts[i]):
            start = -(-end // unit) * unit
            placed[index] = PartWords(start, self._counts[index])
            end = start + self._counts[index]
        return tuple(placed[index] for index in range(self.num_parts))

    def stored_shape(self, part: int) -> StoredShape:
        """How part number `part` is stored."""
        shape = self.shapes[part]
        if len(shape) == 1:
            return StoredShape(1, 1, shape[0])
        if len(shape) == 2:
            return StoredShape(1, shape[1], shape[0])
        heads, head_size, size = shape
        together = max(LANES // head_size, 1)
        if LANES % head_size or heads % together:
            together = 1
        return StoredShape(heads // together, size, together * head_size)

    def stored_of(self, part: int, value: jax.Array) -> jax.Array:
        """`[..., *shape]` in the order in which it is stored, `[..., blocks, size, lanes]`."""
        blocks, size, lanes = self.stored_shape(part)
        lead = value.shape[: value.ndim - len(self.shapes[part])]
        return jnp.swapaxes(value.reshape(*lead, blocks, lanes, size), -1, -2)

    def value_of(self, part: int, stored: jax.Array) -> jax.Array:
        """The inverse of `stored_of`."""
        lead = stored.shape[:-3]
        return jnp.swapaxes(stored, -1, -2).reshape(*lead, *self.shapes[part])

    def run_size(self, part: int) -> int:
        """Elements of a run of a bfloat16 part."""
        blocks, size, lanes = self.stored_shape(part)
        if blocks % 2 == 0:
            return size * lanes
        if size % 2 == 0:
            return lanes
        return lanes // 2 if lanes % 2 == 0 else self.parts[part].size

    def words_of(self, part: int, stored: jax.Array) -> jax.Array:
        """Words `uint32[..., size]` of a part `[..., blocks, size, lanes]`, rounded to its dtype."""
        lead, elements = stored.shape[:-3], prod(self.shapes[part])
        flat = stored.reshape(*lead, elements)
        if self.dtypes[part] == "float32":
            return lax.bitcast_convert_type(flat.astype(jnp.float32), jnp.uint32)
        bits = lax.bitcast_convert_type(flat.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
        size = self.parts[part].size
        bits = jnp.pad(bits, [(0, 0)] * len(lead) + [(0, 2 * size - elements)])
        pairs = bits.reshape(*lead, size // self.run_size(part), 2, self.run_size(part))
        return (pairs[..., 0, :] | (pairs[..., 1, :] << 16)).reshape(*lead, size)

    def stored_of_words(self, part: int, words: jax.Array) -> jax.Array:
        """The part in float32 `[..., blocks, size, lanes]` from its words `uint32[..., size]`."""
        lead, stored = words.shape[:-1], self.stored_shape(part)
        if self.dtypes[part] == "float32":
            return lax.bitcast_convert_type(words, jnp.float32).reshape(*lead, *stored)
        size, run = self.parts[part].size, self.run_size(part)
        pairs = jnp.stack(unpack_pair(words.reshape(*lead, size // run, run)), axis=-2)
        return pairs.reshape(*lead, 2 * size)[..., : prod(stored)].reshape(*lead, *stored)

    def unpack(self, words: jax.Array) -> tuple[jax.Array, ...]:
        """The parts, in their shapes and dtypes, from `uint32[..., num_pages * page_words]`: all words."""
        values = []
        for part, (start, count) in enumerate(self.parts):
            stored = self.stored_of_words(part, words[..., start : start + count])
            values.append(self.value_of(part, stored).astype(self.dtypes[part]))
        return tuple(values)

    def pack(self, values: tuple[jax.Array, ...]) -> jax.Array:
        """All words of a state, zero where there is no part: the inverse of `unpack`."""
        lead = values[0].shape[: values[0].ndim - len(self.shapes[0])]
        words = jnp.zeros((*lead, self.num_pages * self.page_words), jnp.uint32)
        for part, ((start, count), value) in enumerate(zip(self.parts, values, strict=True)):
            words = words.at[..., start : start + count].set(self.words_of(part, self.stored_of(part, value)))
        return words
