"""Page writes of a plane whose tokens share rows of 128 words: rows are read, mixed and written back.

Neighbours are the few tokens that fill whole rows together; a set is such rows, of all heads (see
`neighbours.py`). XLA lays the step's tokens out as the rows of their sets will be. A set whose neighbours are
all new is written as it is, and so is a whole page of them; only at the ends of a sequence's new tokens are
old rows read first.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.layout import LANES
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.neighbours import NeighbourSets, SharedRows, sets_of

STEP_BYTES = 1 << 20  # of the sets of one grid step
MIXED_SETS = 8  # mixed at a time: their rows are whole tiles


class WriteScalars(NamedTuple):
    """What steers the kernel, int32 in SMEM: the number of live sets `[1]`, and of each set what
    `NeighbourSets` says, and whether a page begins with it that is new and within this grid step.
    """

    live: jax.Array
    page: jax.Array
    place: jax.Array
    first: jax.Array
    new: jax.Array
    fills_page: jax.Array


def write_shared_rows(
    pages: jax.Array,
    words: jax.Array,
    shared: SharedRows,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
    *,
    interpret: Any = False,
) -> jax.Array:
    """The pool with `words uint32[T, Hkv, W]` of the step's tokens in the rows of their pages."""
    tokens = words.shape[0]
    most = min(tokens, tokens // shared.neighbours + 2 * batch.seq_lens.shape[0])
    whole = -(-most // MIXED_SETS)
    size = MIXED_SETS * max(
        min(STEP_BYTES // (MIXED_SETS * shared.pieces * shared.rows * LANES * 4), whole), 1
    )
    steps = -(-most // size)
    sets = sets_of(batch, table, settings, shared, steps * size)
    ends_here = jnp.arange(steps * size) % size + shared.page_sets <= size
    scalars = WriteScalars(
        live=(sets.new > 0).sum(dtype=jnp.int32).reshape(1),
        page=sets.page,
        place=sets.place,
        first=sets.first,
        new=sets.new,
        fills_page=(sets.begins_new_page & ends_here).astype(jnp.int32),
    )
    images = _images(words, sets, shared)
    block = (shared.pieces, size * shared.rows, LANES)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(_kernel, shared, size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(steps,),
            in_specs=[pl.BlockSpec(block, lambda i, *_: (0, i, 0)), anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.VMEM(block, jnp.uint32), pltpu.SemaphoreType.DMA((2,))],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={len(scalars) + 1: 0},
        interpret=interpret,
        name="write_shared_rows",
    )(*scalars, images, pages)


def _images(words: jax.Array, sets: NeighbourSets, shared: SharedRows) -> jax.Array:
    """The rows of sets `[pieces, N * rows, 128]`; words of tokens that are not new have no meaning."""
    tokens = jnp.clip(sets.token[:, None] + jnp.arange(shared.neighbours), 0, words.shape[0] - 1)
    return shared.images(words[tokens])


def _kernel(
    shared: SharedRows,
    size: int,
    live_ref,
    page_ref,
    place_ref,
    first_ref,
    new_ref,
    fills_page_ref,
    images_ref,
    _,
    pages_ref,
    mixed_ref,
    semaphores,
) -> None:
    """A grid step: all reads and whole writes are started, then the mixed rows are made and written."""
    base = pl.program_id(0) * size
    stop = jnp.minimum(live_ref[0], base + size)
    reads, writes = semaphores.at[0], semaphores.at[1]

    def in_page(index, piece, sets):
        row = shared.first_row(piece) + place_ref[index] * shared.rows
        return pages_ref.at[page_ref[index], pl.ds(row, sets * shared.rows)]

    def in_step(index, sets):
        return pl.ds((index - base) * shared.rows, sets * shared.rows)

    def each_piece(act):
        for piece in range(shared.pieces):
            act(piece)

    def write(source, index, sets, act):
        each_piece(
            lambda piece: act(
                pltpu.make_async_copy(
                    source.at[piece, in_step(index, sets)], in_page(index, piece, sets), writes
                )
            )
        )

    def read(index, act):
        each_piece(
            lambda piece: act(
                pltpu.make_async_copy(in_page(index, piece, 1), mixed_ref.at[piece, in_step(index, 1)], reads)
            )
        )

    def walk(on_page, on_set, on_mixed):
        """Calls one of three functions on each page that is filled, set that is, and set that is mixed."""

        def step(index):
            fills_page = fills_page_ref[index] == 1
            is_new = new_ref[index] == shared.neighbours
            pl.when(fills_page)(lambda: on_page(index))
            pl.when(is_new & jnp.logical_not(fills_page))(lambda: on_set(index))
            pl.when(jnp.logical_not(is_new))(lambda: on_mixed(index))
            return index + jnp.where(fills_page, shared.page_sets, 1)

        lax.while_loop(lambda index: index < stop, step, base)

    def start(copy):
        copy.start()

    def wait(copy):
        copy.wait()

    def nothing(index):
        del index

    walk(
        lambda index: write(images_ref, index, shared.page_sets, start),
        lambda index: write(images_ref, index, 1, start),
        lambda index: read(index, start),
    )
    walk(nothing, nothing, lambda index: read(index, wait))
    lax.fori_loop(
        0,
        (stop - base + MIXED_SETS - 1) // MIXED_SETS,
        lambda turn, _: _mix(shared, base, turn * MIXED_SETS, first_ref, new_ref, images_ref, mixed_ref),
        None,
    )
    walk(nothing, nothing, lambda index: write(mixed_ref, index, 1, start))
    walk(
        lambda index: write(images_ref, index, shared.page_sets, wait),
        lambda index: write(images_ref, index, 1, wait),
        lambda index: write(mixed_ref, index, 1, wait),
    )


def _mix(shared: SharedRows, base, begin, first_ref, new_ref, images_ref, mixed_ref) -> None:
    """Puts the new tokens of a few sets from `begin` of the step on among the old ones in `mixed_ref`."""
    rows = pl.ds(pl.multiple_of(begin * shared.rows, MIXED_SETS), MIXED_SETS * shared.rows)
    shape = (MIXED_SETS * shared.rows, LANES)
    word = lax.broadcasted_iota(jnp.int32, shape, 0) * LANES + lax.broadcasted_iota(jnp.int32, shape, 1)
    is_new = jnp.zeros(shape, jnp.bool_)
    for index in range(MIXED_SETS):
        first = index * shared.neighbours + first_ref[base + begin + index]
        after = first + new_ref[base + begin + index]
        is_new |= shared.is_of(word, first, after)
    for piece in range(shared.pieces):
        mixed_ref[piece, rows] = jnp.where(is_new, images_ref[piece, rows], mixed_ref[piece, rows])
