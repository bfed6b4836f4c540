"""One state's part in the pool, moved as a few runs of neighbouring words, at memory speed on a CPU."""

from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.state_place import StatePlace


class Run(NamedTuple):
    """`size` words of the part, from word `start` of the state's page number `page` on."""

    page: int
    start: int
    size: int


def runs_of(place: StatePlace) -> list[Run]:
    """The part's words in order, cut where pages end."""
    first, size = place.words
    page_words = place.layout.page_words
    runs, end = [], first + size
    while first < end:
        stop = min(first // page_words * page_words + page_words, end)
        runs.append(Run(first // page_words, first % page_words, stop - first))
        first = stop
    return runs


def open_pool(pages: jax.Array, place: StatePlace) -> jax.Array:
    """The pool in the shape in which a run of the part is a window: rows where the part is whole rows."""
    return pages if place.words.are_rows else pages.reshape(pages.shape[0], place.layout.page_words)


def close_pool(pool: jax.Array, place: StatePlace) -> jax.Array:
    """The inverse of `open_pool`."""
    return pool.reshape(pool.shape[0], place.layout.page_rows, LANES)


def read_state(pool: jax.Array, blocks: jax.Array, place: StatePlace) -> jax.Array:
    """The part, float32 `[blocks, size, lanes]`, of the state in `blocks` `[P]`; zeros where that is 0."""
    page_ids = place.page_ids(blocks)
    runs = runs_of(place)
    if len(runs) == 1:
        words = lax.dynamic_slice(pool, _at(pool, page_ids, runs[0]), _window(pool, runs[0])).reshape(-1)
    else:
        whole = pool.at[page_ids[runs[0].page : runs[-1].page + 1]].get(mode="promise_in_bounds")
        words = whole.reshape(-1)[runs[0].start : runs[0].start + place.words.size]
    stored = place.layout.stored_of_words(place.part, words)
    return jnp.where(blocks[0] != 0, stored, 0)


def write_state(
    pool: jax.Array, stored: jax.Array, blocks: jax.Array, live: jax.Array, place: StatePlace
) -> jax.Array:
    """The pool with the part written to `blocks` `[P]`, if `live` and they are not 0."""
    page_ids = place.page_ids(blocks)
    runs = runs_of(place)
    page_words = place.layout.page_words
    words = place.layout.words_of(place.part, stored)

    def write_run(pool: jax.Array, run: Run, start: int) -> jax.Array:
        piece = words[start : start + run.size].reshape(_window(pool, run))
        return lax.dynamic_update_slice(pool, piece, _at(pool, page_ids, run))

    def write(_: jax.Array, pool: jax.Array) -> jax.Array:
        start = 0
        for whole, some in groupby(runs, lambda run: run.size == page_words):
            group = list(some)
            size = sum(run.size for run in group)
            if whole:
                ids = page_ids[group[0].page : group[-1].page + 1]
                pieces = words[start : start + size].reshape(len(group), *pool.shape[1:])
                pool = pool.at[ids].set(pieces, mode="promise_in_bounds", unique_indices=True)
            else:
                for run in group:
                    pool = write_run(pool, run, start)
            start += size
        return pool

    # A loop of one turn or none: XLA updates the pool in place there, where a condition may copy it.
    return lax.fori_loop(0, (live & (blocks[0] != 0)).astype(jnp.int32), write, pool)


def _at(pool: jax.Array, page_ids: jax.Array, run: Run) -> tuple[jax.Array | int, ...]:
    unit = LANES if pool.ndim == 3 else 1
    return (page_ids[run.page], run.start // unit) + (0,) * (pool.ndim - 2)


def _window(pool: jax.Array, run: Run) -> tuple[int, ...]:
    return (1, run.size // LANES, LANES) if pool.ndim == 3 else (1, run.size)
