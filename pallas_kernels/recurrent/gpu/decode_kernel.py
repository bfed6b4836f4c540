"""One token of a linear recurrence for every sequence, states read and written once, in place.

A line is 128 channels; its state has `size` rows of 128 words. A block of 128 threads serves one line of one
sequence, a thread one channel, so that sums over the state need no exchange. The delta rule reads the state
twice, the second time from the cache.

For row n of a line, with scalars b_n and c_n:

    h_n = decay_n h_n + b_n u        y = sum_n c_n h_n

The delta rule's u is a correction: `u = beta (v - sum_n b_n decay_n h_n)`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable

ROWS_AT_ONCE = 16


class LineInputs(NamedTuple):
    """A token of every sequence, float32, L being the number of lines.

    added `[S, L, 128]` is u, or v of the delta rule; decay `[S, L, 128]` is one factor for all rows, or with
    `rates [size, L, 128]` the time step of factors `exp(decay * rates)`; b, c `[S, G, size]` are shared by
    neighbouring lines, L being a multiple of G; beta `[S, L, 128]` is the delta rule's.
    """

    added: jax.Array
    decay: jax.Array
    b: jax.Array
    c: jax.Array
    rates: jax.Array | None = None
    beta: jax.Array | None = None


class StatePages(NamedTuple):
    """Where states are: live `[S]`, whether they are there; pages `[S, num_pages]` of the layer. Int32."""

    live: jax.Array
    pages: jax.Array


def decode_lines(
    inputs: LineInputs,
    pages: jax.Array,
    num_decodes: jax.Array,
    table: StateTable,
    place: StatePlace,
    *,
    interpret: Any = None,
) -> StepResult:
    """Outputs `[S, L, 128]` float32, without meaning from row `num_decodes` on, and the pool."""
    sequences, lines, _ = inputs.added.shape
    given = {name: value for name, value in inputs._asdict().items() if value is not None}
    pool = jax.new_ref(pages)
    out = plgpu.kernel(
        partial(_kernel, place, tuple(given)),
        out_type=jax.ShapeDtypeStruct(inputs.added.shape, jnp.float32),
        grid=(sequences, lines),
        grid_names=("sequence", "line"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(
        num_decodes.reshape(1).astype(jnp.int32),
        *_state_pages(table.read, place),
        *_state_pages(table.write, place),
        *given.values(),
        pool,
    )
    return StepResult(out, jax.freeze(pool))


def _state_pages(blocks: jax.Array, place: StatePlace) -> StatePages:
    return StatePages((blocks[:, 0] != 0).astype(jnp.int32), place.page_ids(blocks).astype(jnp.int32))


def _kernel(place: StatePlace, given: tuple[str, ...], num_decodes_ref: Any, *refs: Any) -> None:
    """`refs`: pages to read, pages to write, the inputs named in `given`, the pool, the output."""
    read, write = StatePages(*refs[:2]), StatePages(*refs[2:4])
    inputs = LineInputs(**dict(zip(given, refs[4:-2], strict=True)))
    pages_ref, out_ref = refs[-2:]
    sequence, line = lax.axis_index("sequence"), lax.axis_index("line")
    stored = place.layout.stored_shape(place.part)
    size, lines_of_block = stored.size, stored.lanes // LANES
    # Lines of a block alternate row by row.
    block = lax.div(line, jnp.int32(lines_of_block))
    first_row = line + (place.words.start // LANES + block * (size - 1) * lines_of_block)
    group = lax.div(line, jnp.int32(inputs.added.shape[1] // inputs.b.shape[1]))
    page_rows = jnp.int32(place.layout.page_rows)

    def row_of(states: StatePages, n: jax.Array) -> Any:
        """Row n of the line's state, where `states` are."""
        row = first_row + n * lines_of_block
        return pages_ref.at[states.pages[sequence, lax.div(row, page_rows)], lax.rem(row, page_rows)]

    turn = math.gcd(size, ROWS_AT_ONCE)

    def over_rows(visit: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        """The sum of `visit(n, decayed row n)` over all rows."""
        live = read.live[sequence] > 0
        decay = inputs.decay[sequence, line]

        def some(index: jax.Array, total: jax.Array) -> jax.Array:
            # All loads first: they wait for memory together.
            rows = [index * turn + part for part in range(turn)]
            kept = [lax.bitcast_convert_type(row_of(read, n)[...], jnp.float32) for n in rows]
            for n, state in zip(rows, kept, strict=True):
                factor = decay if inputs.rates is None else jnp.exp(decay * inputs.rates[n, line])
                total = total + visit(n, factor * jnp.where(live, state, 0.0))
            return total

        one_a_thread = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
        none = plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), one_a_thread)
        return lax.fori_loop(0, size // turn, some, none)

    @pl.when(sequence < num_decodes_ref[0])
    def _():
        added = inputs.added[sequence, line]
        if inputs.beta is not None:
            seen = over_rows(lambda n, decayed: inputs.b[sequence, group, n] * decayed)
            added = inputs.beta[sequence, line] * (added - seen)

        def update(n: jax.Array, decayed: jax.Array) -> jax.Array:
            state = decayed + inputs.b[sequence, group, n] * added

            @pl.when(write.live[sequence] > 0)
            def _():
                row_of(write, n)[...] = lax.bitcast_convert_type(state, jnp.uint32)

            return inputs.c[sequence, group, n] * state

        out_ref[sequence, line] = over_rows(update)
