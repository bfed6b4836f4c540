"""One token on matrix states in VMEM, eight rows of a state at a time.

A row of a key must meet the rows of a state as a column, the same number on all lanes:

    rows of q and k, three bfloat16 terms a number  -> columns    a group of sequences at once
    columns x ones where a tile is                  -> tiles      a slab ahead of the arithmetic

The product is exact: each sum is the three terms of one number, and zeros.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES, TILE_ROWS
from pallas_kernels.recurrent.tpu.decode_loop import At
from pallas_kernels.recurrent.tpu.matrix_sizes import MatrixSizes
from pallas_kernels.recurrent.tpu.products import FLOAT32_TERMS, terms_of
from pallas_kernels.recurrent.tpu.slabs import pack_rows, unpack_rows

DECODE_BLOCKS = 8
"""Blocks of a slab at most."""
SLAB_ROWS = 1024
"""Their rows at most: 512 KiB of float32, of which `copies.py` has sixteen; v5e's kernels have 16 MiB."""


@dataclass(frozen=True, kw_only=True)
class MatrixDecode:
    """Slabs of `slab` blocks `[size, 128]` that read `keys` key heads.

    key_slabs: of a sequence; `num_slabs // key_slabs` slabs after each other read the same keys.
    packed: two blocks share the words.
    """

    size: int
    slab: int
    num_slabs: int
    keys: int
    key_slabs: int
    packed: bool

    @classmethod
    def of(cls, sizes: MatrixSizes, packed: bool) -> "MatrixDecode":
        """How decodes go over states of some sizes."""
        slab = sizes.slab(min(DECODE_BLOCKS, SLAB_ROWS // sizes.size), packed)
        num_slabs = sizes.blocks // slab
        return cls(
            size=sizes.size,
            slab=slab,
            num_slabs=num_slabs,
            keys=sizes.keys(slab),
            key_slabs=num_slabs // max(sizes.sharing // slab, 1),
            packed=packed,
        )

    @property
    def sharing(self) -> int:
        """Blocks of a slab that read one key head."""
        return max(self.slab // self.keys, 1)

    def scratch(self, together: int) -> list[Any]:
        """Of a group of sequences: columns, products q . k, ones; and the tiles of two slabs."""
        terms = FLOAT32_TERMS * 2 * self.keys
        return [
            pltpu.VMEM((together, self.key_slabs, self.size, terms), jnp.bfloat16),
            pltpu.VMEM((together, self.key_slabs, self.keys, LANES), jnp.float32),
            pltpu.VMEM((terms, 2 * self.keys * LANES), jnp.bfloat16),
            *[pltpu.VMEM((self.size, 2 * self.keys * LANES), jnp.float32)] * 2,
        ]

    def arrange(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """q, k `[..., Hk, size]` as `[..., key_slabs * 2 * keys, size]`: a key slab's queries above its
        keys."""
        lead = q.shape[:-2]
        both = [x.reshape(*lead, self.key_slabs, self.keys, self.size) for x in (q, k)]
        return jnp.concatenate(both, axis=-2).reshape(*lead, -1, self.size)

    def turn(self, rows: list[jax.Array], columns_ref: Any, alike_ref: Any, ones_ref: Any) -> None:
        """Fills columns, products and ones from each sequence's arranged rows."""
        stacked, width = [], FLOAT32_TERMS * 2 * self.keys
        for index in range(len(rows) * self.key_slabs):
            seq, slab = divmod(index, self.key_slabs)
            both = rows[seq][slab * 2 * self.keys : (slab + 1) * 2 * self.keys]
            alike = (both[: self.keys] * both[self.keys :]).sum(axis=1, keepdims=True)
            alike_ref[seq, slab] = jnp.broadcast_to(alike, (self.keys, LANES))
            stacked += [term.astype(jnp.float32) for term in terms_of(both, FLOAT32_TERMS)]
        columns = jnp.concatenate(stacked).T
        for index in range(len(rows) * self.key_slabs):
            here = columns[:, index * width : (index + 1) * width]
            columns_ref[divmod(index, self.key_slabs)] = here.astype(jnp.bfloat16)
        row, column = (lax.broadcasted_iota(jnp.int32, ones_ref.shape, axis) for axis in range(2))
        own = row % (2 * self.keys) == column // LANES
        ones_ref[...] = own.astype(jnp.float32).astype(jnp.bfloat16)

    def spread(self, at: At, columns_ref: Any, ones_ref: Any, tiles_ref: Any) -> None:
        """Fills a slab's tiles."""
        columns = columns_ref[at.seq, self._key_slab(at)]
        tiles_ref[...] = jnp.dot(columns, ones_ref[...], preferred_element_type=jnp.float32)

    def compute(self, at: At, in_buffer, out_buffer, vectors, alike_ref, tiles_ref, out_ref) -> None:
        """vectors: v, decay and, for the delta rule, beta `[slab, 128]`; out_ref likewise."""
        v_ref, decay_ref, *beta_refs = vectors
        alike_ref = alike_ref.at[at.seq, self._key_slab(at)]
        for blocks in self._groups():
            decay = {b: decay_ref[b : b + 1] for b in blocks}
            added = {b: v_ref[b : b + 1] for b in blocks}
            for beta_ref in beta_refs:
                seen = dict.fromkeys(blocks, jnp.zeros((TILE_ROWS, LANES), jnp.float32))
                for row in range(0, self.size, TILE_ROWS):
                    k, states = (
                        self._key(tiles_ref, self.keys, blocks, row),
                        self._load(in_buffer, blocks, row),
                    )
                    seen = {b: seen[b] + k[b] * states[b] for b in blocks}
                added = {
                    b: beta_ref[b : b + 1] * (added[b] - decay[b] * seen[b].sum(axis=0, keepdims=True))
                    for b in blocks
                }
            asked = dict.fromkeys(blocks, jnp.zeros((TILE_ROWS, LANES), jnp.float32))
            for row in range(0, self.size, TILE_ROWS):
                q, k = (self._key(tiles_ref, first, blocks, row) for first in (0, self.keys))
                states = self._load(in_buffer, blocks, row)
                asked = {b: asked[b] + q[b] * states[b] for b in blocks}
                self._store(out_buffer, {b: decay[b] * states[b] + k[b] * added[b] for b in blocks}, row)
            for b in blocks:
                key = b // self.sharing
                own = alike_ref[key : key + 1] * added[b]
                out_ref[b : b + 1] = decay[b] * asked[b].sum(axis=0, keepdims=True) + own

    def _key_slab(self, at: At) -> Any:
        per_key = self.num_slabs // self.key_slabs
        return at.slab // per_key if per_key > 1 else at.slab

    def _groups(self) -> list[range]:
        """Blocks that go together: two of one key head, which share the loads of its tiles (with more, sums
        do not stay in registers), or two of bfloat16, which share words.
        """
        together = 2 if self.packed or self.sharing % 2 == 0 else 1
        return [range(first, first + together) for first in range(0, self.slab, together)]

    def _key(self, tiles_ref, first: int, blocks: range, row: int) -> dict[int, jax.Array]:
        """Eight rows of each block's tile."""
        keys = {b: first + b // self.sharing for b in blocks}
        tiles = {
            key: tiles_ref[row : row + TILE_ROWS, key * LANES : (key + 1) * LANES]
            for key in set(keys.values())
        }
        return {b: tiles[key] for b, key in keys.items()}

    def _load(self, words, blocks: range, row: int) -> dict[int, jax.Array]:
        """Eight rows of the blocks."""
        return {b: unpack_rows(words[self._rows(b, row)], self.packed, b % 2) for b in blocks}

    def _store(self, words, states: dict[int, jax.Array], row: int) -> None:
        """The inverse of `_load`."""
        halves = 2 if self.packed else 1
        for first in list(states)[::halves]:
            values = [states[first + half] for half in range(halves)]
            words[self._rows(first, row)] = pack_rows(values, self.packed)

    def _rows(self, block: int, row: int) -> slice:
        begin = (block // 2 if self.packed else block) * self.size + row
        return slice(begin, begin + TILE_ROWS)
