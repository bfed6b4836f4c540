"""Copying one part of many states out of the pool and into it, with DMAs from HBM to HBM."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.tpu.slabs import SlabPlan, StatePages


def take(pages: jax.Array, states: StatePages, place: StatePlace, *, interpret: Any) -> jax.Array:
    """Words `uint32[M, size]` of the part of M states; of any value where a state is not real."""
    plan = SlabPlan.of(place, 1)
    count = states.live.shape[0]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    words = pl.pallas_call(
        partial(_kernel, plan, False),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        out_shape=jax.ShapeDtypeStruct((count, plan.rows, LANES), jnp.uint32),
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=interpret,
        name="take_states",
    )(*states, pages)
    return words.reshape(count, plan.rows * LANES)


def put(
    pages: jax.Array, words: jax.Array, states: StatePages, place: StatePlace, *, interpret: Any
) -> jax.Array:
    """The pool with words `uint32[M, size]` in the part of the states that are real."""
    plan = SlabPlan.of(place, 1)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(_kernel, plan, True),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[anywhere, anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=interpret,
        name="put_states",
    )(*states, words.reshape(-1, plan.rows, LANES), pages)


def _kernel(plan: SlabPlan, to_pool: bool, ids_ref, live_ref, source_ref, *refs) -> None:
    """Starts every copy, then waits for every copy. `to_pool`: from words to pages, else the reverse."""
    states = StatePages(ids_ref, live_ref)
    *_, target_ref, semaphore = refs
    pages_ref, words_ref = (target_ref, source_ref) if to_pool else (source_ref, target_ref)

    def walk(act) -> None:
        lax.fori_loop(0, words_ref.shape[0], lambda state, _: act(state), None)

    def start(state):
        plan.start(pages_ref, states, state, 0, words_ref.at[state], semaphore, to_pool=to_pool)

    walk(start)
    walk(lambda state: plan.wait(states, state, words_ref.at[state], semaphore))
