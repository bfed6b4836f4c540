"""Reading and writing one part of many states: plain gathers and scatters of words."""

import jax
import jax.numpy as jnp

from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.state_place import StatePlace


def read_states(pages: jax.Array, blocks: jax.Array, place: StatePlace) -> jax.Array:
    """The part, float32 `[..., blocks, size, lanes]` as stored, of the states in `blocks` `[..., P]`.

    Zeros where the first block is 0.
    """
    start, count = place.words
    index = start + jnp.arange(count, dtype=jnp.int32)
    page = place.page_ids(blocks)[..., index // place.layout.page_words]
    word = index % place.layout.page_words
    stored = place.layout.stored_of_words(place.part, pages[page, word // LANES, word % LANES])
    return jnp.where((blocks[..., 0] != 0)[..., None, None, None], stored, 0)


def write_states(pages: jax.Array, stored: jax.Array, blocks: jax.Array, place: StatePlace) -> jax.Array:
    """The pool with the part `[..., blocks, size, lanes]` written to `blocks` `[..., P]`.

    Nothing is written where the first block is 0, and no word of another part.
    """
    start, count = place.words
    index = start + jnp.arange(count, dtype=jnp.int32)
    page_ids = jnp.where((blocks[..., :1] != 0), place.page_ids(blocks), pages.shape[0])
    page = page_ids[..., index // place.layout.page_words]
    word = index % place.layout.page_words
    words = place.layout.words_of(place.part, stored)
    return pages.at[page, word // LANES, word % LANES].set(words, mode="drop")
