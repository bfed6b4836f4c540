"""Decodes within the pool: every tile of a state is decayed, added to and summed where it lies.

One loop over sequences, blocks and tiles, without a matrix product or a scatter: XLA makes one function of it
on a CPU, in which a turn costs next to nothing and a tile stays in the nearest cache. A state is read from
memory once and written once. It runs on one thread, as whatever writes to the pool does.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import LANES, TILE_ROWS
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.xla.exponentials import exp2_of_negative
from pallas_kernels.recurrent.xla.pick import pick, put

TILE_WORDS = TILE_ROWS * LANES
_Carry = TypeVar("_Carry")


class TokenUpdate(NamedTuple):
    """What a token of each of S sequences does to a state S `[blocks, size, lanes]`, all float32:

    `S = decay S + key added`, and its output is the sum of `query S` over `size`.

    keys, queries `[S, K, size]`: each for as many blocks. added, decays `[S, blocks, lanes]`.
    rates `[size, lanes]`, of a state of one block: decay is 2^(decays rates). None: it is `decays`.
    beta `[S, blocks, lanes]`: what is added is `beta (added - sum of decay key S)`. None: it is `added`.
    """

    keys: jax.Array
    queries: jax.Array
    added: jax.Array
    decays: jax.Array
    rates: jax.Array | None = None
    beta: jax.Array | None = None


class TileShape(NamedTuple):
    """A tile's rows and lanes of a stored state."""

    rows: int
    lanes: int


def tile_shape(place: StatePlace) -> TileShape | None:
    """How tiles of 1,024 words lie in the part, or None where they are not rows of one block."""
    _, size, lanes = place.layout.stored_shape(place.part)
    rows = max(TILE_WORDS // lanes, 1)
    even = lanes % TILE_WORDS == 0 or (TILE_WORDS % lanes == 0 and size % rows == 0)
    if place.layout.dtypes[place.part] != "float32" or place.words.start % TILE_WORDS or not even:
        return None
    return TileShape(rows, min(lanes, TILE_WORDS))


def decode_tiles(
    update: TokenUpdate,
    tile: TileShape,
    pages: jax.Array,
    seq_lens: jax.Array,
    num_decodes: jax.Array,
    table: StateTable,
    place: StatePlace,
) -> tuple[jax.Array, jax.Array]:
    """Outputs `[S, blocks, lanes]`, of any value from `num_decodes` on, and the pool with the new states."""
    loop = _Loop(update, tile, seq_lens, table, place)
    pool = pages.reshape(pages.shape[0], -1, *tile)
    pool, out = lax.fori_loop(0, num_decodes, loop.sequence, (pool, jnp.zeros_like(loop.added)))
    return out.reshape(update.added.shape), pool.reshape(pages.shape)


class _Tile(NamedTuple):
    """A tile's page, its number there, and its place in its block."""

    page: jax.Array
    tile: jax.Array
    down: jax.Array
    across: jax.Array

    @property
    def begin(self) -> tuple[jax.Array | int, ...]:
        """Where it begins in the pool."""
        return (self.page, self.tile, 0, 0)


class _Loop:
    """The loop's turns. `pool [pages, tiles of a page, rows, lanes]`, words."""

    def __init__(
        self,
        update: TokenUpdate,
        tile: TileShape,
        seq_lens: jax.Array,
        table: StateTable,
        place: StatePlace,
    ) -> None:
        self.blocks, self.size, self.lanes = place.layout.stored_shape(place.part)
        self.tile, self.table = tile, table
        self.tiles_across, self.tiles_down = self.lanes // tile.lanes, self.size // tile.rows
        self.first_tile = place.words.start // TILE_WORDS
        self.tiles_of_page = place.layout.page_words // TILE_WORDS
        self.read, self.write, self.kept = (
            place.page_ids(blocks) for blocks in (table.read, table.write, table.checkpoint)
        )
        self.reached = (table.checkpoint_lens == seq_lens[:, None]) & (table.checkpoint[..., 0] != 0)
        sequences, keys = update.keys.shape[0], update.keys.shape[1]
        self.blocks_of_key = self.blocks // keys
        columns = (sequences, self.blocks, self.tiles_across, tile.lanes)
        rows = (sequences, keys, self.tiles_down, tile.rows)
        self.alike = (update.keys * update.queries).sum(axis=-1)
        self.keys, self.queries = update.keys.reshape(rows), update.queries.reshape(rows)
        self.added, self.decays = update.added.reshape(columns), update.decays.reshape(columns)
        self.beta = None if update.beta is None else update.beta.reshape(columns)
        rates = (self.tiles_down, tile.rows, self.tiles_across, tile.lanes)
        self.rates = None if update.rates is None else update.rates.reshape(rates).swapaxes(1, 2)

    def sequence(self, seq: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """One sequence: to its own blocks first, then its token, then its checkpoints."""
        pool, out = carry
        read, write = pick(self.table.read, seq)[0], pick(self.table.write, seq)[0]
        pool = self._copy(pool, pick(self.read, seq), pick(self.write, seq), (read != 0) & (read != write))

        def one(block: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            pool, out = carry
            pool, y = self._block(pool, seq, block, read == 0)
            return pool, put(out, y, seq, block)

        # Of one block, too, this stays a loop. Else sums and checkpoints would have no order, and XLA would
        # copy the pool.
        blocks = jnp.where(seq >= 0, self.blocks, 0)
        pool, out = lax.fori_loop(0, blocks, one, (pool, out))
        for index in range(self.table.checkpoint.shape[1]):
            kept, reached = pick(self.kept, seq, index), pick(self.reached, seq, index)
            pool = self._copy(pool, pick(self.write, seq), kept, reached)
        return pool, out

    def _block(
        self, pool: jax.Array, seq: jax.Array, block: jax.Array, fresh: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The tiles of a block and their sums `[tiles across, lanes]`. `fresh`: they count as 0."""
        key, pages = lax.div(block, self.blocks_of_key), pick(self.write, seq)
        first = self.first_tile + block * self.tiles_down * self.tiles_across

        def tile_at(index: jax.Array) -> _Tile:
            page, tile = (
                lax.div(first + index, self.tiles_of_page),
                lax.rem(first + index, self.tiles_of_page),
            )
            down, across = lax.div(index, self.tiles_across), lax.rem(index, self.tiles_across)
            return _Tile(pick(pages, page), tile, down, across)

        def over_tiles(turn: Callable[[_Tile, _Carry], _Carry], carry: _Carry) -> _Carry:
            # Where a tile lies is carried. Computed in the turn that needs it, XLA would not see that it is
            # read and written at one place, and copy it before it is changed.
            def step(index: jax.Array, both: tuple[_Tile, _Carry]) -> tuple[_Tile, _Carry]:
                return tile_at(index + 1), turn(*both)

            tiles = jnp.where(block >= 0, self.tiles_down * self.tiles_across, 0)  # a loop, as above
            return lax.fori_loop(0, tiles, step, (tile_at(jnp.int32(0)), carry))[1]

        def column(values: jax.Array, tile: _Tile) -> jax.Array:
            return pick(values, seq, block, tile.across)

        def state_at(pool: jax.Array, tile: _Tile) -> jax.Array:
            words = lax.dynamic_slice(pool, tile.begin, (1, 1, *self.tile), allow_negative_indices=False)
            return lax.bitcast_convert_type(words, jnp.float32)

        def put_state(pool: jax.Array, tile: _Tile, state: jax.Array) -> jax.Array:
            words = lax.bitcast_convert_type(state, jnp.uint32)
            return lax.dynamic_update_slice(pool, words, tile.begin, allow_negative_indices=False)

        def products(tile: _Tile, added: jax.Array) -> jax.Array:
            return pick(self.keys, seq, key, tile.down)[:, None] * added

        def with_sum(sums: jax.Array, pool: jax.Array, weights: jax.Array, tile: _Tile) -> jax.Array:
            rows = [
                pick(weights, seq, key, tile.down, row)
                * lax.bitcast_convert_type(pick(pool, tile.page, tile.tile, row), jnp.float32)
                for row in range(self.tile.rows)
            ]
            return put(sums, pick(sums, tile.across) + sum(rows[1:], rows[0]), tile.across)

        def decayed(pool: jax.Array, tile: _Tile) -> jax.Array:
            decay = column(self.decays, tile)
            if self.rates is not None:
                decay = exp2_of_negative(decay * pick(self.rates, tile.down, tile.across))
            return decay * jnp.where(fresh, 0, state_at(pool, tile))

        def once(tile: _Tile, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            pool, asked = carry
            pool = put_state(pool, tile, decayed(pool, tile) + products(tile, column(self.added, tile)))
            return pool, with_sum(asked, pool, self.queries, tile)

        def look(
            tile: _Tile, carry: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            pool, seen, asked = carry
            pool = put_state(pool, tile, decayed(pool, tile))
            return pool, with_sum(seen, pool, self.keys, tile), with_sum(asked, pool, self.queries, tile)

        none = jnp.zeros((self.tiles_across, self.tile.lanes), jnp.float32)
        if self.beta is None:
            return over_tiles(once, (pool, none))
        pool, seen, asked = over_tiles(look, (pool, none, none))
        added = pick(self.beta, seq, block) * (pick(self.added, seq, block) - seen)

        def grow(tile: _Tile, pool: jax.Array) -> jax.Array:
            return put_state(pool, tile, state_at(pool, tile) + products(tile, pick(added, tile.across)))

        return over_tiles(grow, pool), asked + pick(self.alike, seq, key) * added

    def _copy(self, pool: jax.Array, source: jax.Array, target: jax.Array, wanted: jax.Array) -> jax.Array:
        """The part's tiles copied from pages to pages, if `wanted`."""

        def one(index: jax.Array, pool: jax.Array) -> jax.Array:
            number = self.first_tile + index
            page, place = lax.div(number, self.tiles_of_page), lax.rem(number, self.tiles_of_page)
            return put(pool, pick(pool, pick(source, page), place), pick(target, page), place)

        tiles = self.blocks * self.tiles_across * self.tiles_down
        return lax.fori_loop(0, jnp.where(wanted, tiles, 0), one, pool)
