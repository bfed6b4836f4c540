"""The kernel for prefill tiles on Hopper: `wgmma` by two groups of 128 threads, fed by a third.

The feeding group unpacks K and V of a chunk to shared memory, where wgmma wants them, while the other two (64
rows of queries each) work on the chunks before. It needs bfloat16 pages and queries.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.live_pages import Chunking, PageStream, TileScalars, TileView
from pallas_kernels.gpu.shared_memory import swizzled
from pallas_kernels.gpu.softmax import HIDDEN, mass_of, scaled_scores, visible_slots
from pallas_kernels.gpu.tile_kernel import Parts

GROUPS = 2  # of threads that compute
GROUP_ROWS = 64  # of a wgmma
TILE_ROWS = GROUPS * GROUP_ROWS
UNPACKED_STAGES = 2
FEEDING_REGISTERS = 72  # a thread; with those of two computing groups at most 512
COMPUTING_REGISTERS = 216


@dataclass(frozen=True, kw_only=True)
class WgmmaPlan:
    """Static sizes of a call: query heads of a tile, tiles that share a KV head, chunks."""

    group: int
    head_tiles: int
    chunking: Chunking


class _Scratch(NamedTuple):
    """Shared memory of a block.

    Means take the place of queries but where V is of another size: there is `mean`. Only 8-bit pages have
    `scales` (K's, then V's), and only the interpreter `weights`: it knows no operands in registers.
    """

    q: Any
    buffers: Any
    keys: Any
    values: Any
    mass: Any
    q_barrier: Any
    barriers: Any
    unpacked: Any
    consumed: Any
    mean: Any = None
    scales: Any = None
    weights: Any = None


def attend_wide_tiles(
    scalars: TileScalars, q: jax.Array, pages: jax.Array, plan: WgmmaPlan, *, interpret: Any = None
) -> Parts:
    """Attention of tiles `q bfloat16[N, Hkv, 128, D]`, over the pool `pages uint32[pages, rows, 128]`."""
    tiles, heads, rows, head_size = q.shape
    chunk, lanes, layout = plan.chunking.chunk, plan.chunking.lanes, plan.chunking.settings.layout
    value_size = layout.value_size
    scratch = _Scratch(
        q=swizzled((GROUPS, GROUP_ROWS, head_size), jnp.bfloat16, lanes.keys),
        buffers=plan.chunking.buffers(),
        keys=swizzled((UNPACKED_STAGES, 1, chunk, head_size), jnp.bfloat16, lanes.keys),
        values=swizzled((UNPACKED_STAGES, 1, chunk, value_size), jnp.bfloat16, lanes.values),
        mass=plgpu.SMEM((GROUPS, GROUP_ROWS), jnp.float32),
        q_barrier=plgpu.Barrier(num_barriers=GROUPS),
        barriers=plan.chunking.barriers(),
        unpacked=plgpu.Barrier(num_barriers=UNPACKED_STAGES),
        consumed=plgpu.Barrier(num_barriers=UNPACKED_STAGES, num_arrivals=GROUPS),
    )
    if value_size != head_size:
        mean = swizzled((GROUPS, GROUP_ROWS, value_size), jnp.bfloat16, lanes.values)
        scratch = scratch._replace(mean=mean)
    if layout.is_quantised:
        scratch = scratch._replace(scales=plgpu.SMEM((UNPACKED_STAGES, 2, chunk), jnp.float32))
    if interpret is not None:
        scratch = scratch._replace(weights=swizzled((GROUPS, GROUP_ROWS, chunk), jnp.bfloat16))
    parts = plgpu.kernel(
        partial(_kernel, plan),
        out_type=(
            jax.ShapeDtypeStruct((tiles, heads, 1, 1, rows, value_size), jnp.bfloat16),
            jax.ShapeDtypeStruct((tiles, heads, 1, rows), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(tiles, heads),
        grid_names=("tile", "head"),
        num_threads=GROUPS + 1,
        thread_name="threads",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(*scalars, q, plan.chunking.views(pages))
    return Parts(*parts)


def _kernel(plan: WgmmaPlan, *refs: Any) -> None:
    """`refs`: the scalars, q, the pool, mean and mass, scratch memory."""
    scalars, refs = TileScalars(*refs[: len(TileScalars._fields)]), refs[len(TileScalars._fields) :]
    q_ref, views, mean_ref, mass_ref = refs[:4]
    scratch = _Scratch(*refs[4:])
    tile, head, threads = (lax.axis_index(name) for name in ("tile", "head", "threads"))
    view = TileView.read(scalars, tile, plan.chunking)

    live = view.num_queries > 0

    @pl.when(live & (threads == GROUPS))
    def _():
        if scratch.weights is None:
            plgpu.set_max_registers(FEEDING_REGISTERS, action="decrease")
        stream = PageStream(
            chunking=plan.chunking,
            view=view,
            head=lax.div(head, jnp.int32(plan.head_tiles)),
            scalars=scalars,
            views=views,
            buffers=scratch.buffers,
            barriers=scratch.barriers,
        )
        _feed(plan, stream, scratch)

    @pl.when(live & (threads < GROUPS))
    def _():
        if scratch.weights is None:
            plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
        rows = pl.ds(threads * GROUP_ROWS, GROUP_ROWS)
        mine = scratch.q.at[threads]
        plgpu.copy_gmem_to_smem(q_ref.at[tile, head, rows], mine, scratch.q_barrier.at[threads])
        plgpu.barrier_wait(scratch.q_barrier.at[threads])
        _compute(plan, view, threads, scratch)
        plgpu.commit_smem()
        mean = mine if scratch.mean is None else scratch.mean.at[threads]
        plgpu.copy_smem_to_gmem(mean, mean_ref.at[tile, head, 0, 0, rows])
        plgpu.copy_smem_to_gmem(scratch.mass.at[threads], mass_ref.at[tile, head, 0, rows])
        plgpu.wait_smem_to_gmem(0)


def _feed(plan: WgmmaPlan, stream: PageStream, scratch: _Scratch) -> None:
    """Brings and unpacks the chunks of a tile in order."""
    stages = plan.chunking.stages
    chunks = stream.view.chunks

    def feed(index, _):
        slot, target = lax.rem(index, jnp.int32(stages)), lax.rem(index, jnp.int32(UNPACKED_STAGES))
        plgpu.barrier_wait(scratch.barriers.at[slot])

        @pl.when(index >= UNPACKED_STAGES)
        def _():
            plgpu.barrier_wait(scratch.consumed.at[target])

        stream.unpack(index, slot, scratch.keys.at[target], scratch.values.at[target])
        if scratch.scales is not None:
            scales = stream.scales(index, slot, plgpu.Layout.WGMMA.reduce(0))
            scratch.scales[target, 0] = scales.keys
            scratch.scales[target, 1] = scales.values
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.unpacked.at[target])
        pl.when(index + stages < chunks)(lambda: stream.fetch(index + stages, slot))

    for slot in range(stages):
        pl.when(slot < chunks)(partial(stream.fetch, jnp.int32(slot), jnp.int32(slot)))
    lax.fori_loop(0, chunks, feed, None)
    for target in range(UNPACKED_STAGES):  # no phase of a barrier stays unseen
        pl.when(target < chunks)(partial(plgpu.barrier_wait, scratch.consumed.at[target]))


def _compute(plan: WgmmaPlan, view: TileView, threads: jax.Array, scratch: _Scratch) -> None:
    """Attention of this group's rows, left in shared memory."""
    chunking, settings = plan.chunking, plan.chunking.settings
    chunk = chunking.chunk
    q = scratch.q.at[threads]
    rows = GROUP_ROWS
    value_size = scratch.values.shape[-1]
    layout = plgpu.Layout.WGMMA

    def filled(shape, value):
        kind = layout if len(shape) == 2 else layout.reduce(1)
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), kind)

    def across(column, size):
        """`[rows]` repeated to `[rows, size]`."""
        return plgpu.layout_cast(lax.broadcast_in_dim(column, (rows, size), [0]), layout)

    def scales_of(slot, index):
        """K's or V's of a chunk, repeated to `[rows, chunk]`; None where there are none."""
        if scratch.scales is None:
            return None
        row = plgpu.load(scratch.scales.at[slot, index], layout=layout.reduce(0))
        return plgpu.layout_cast(lax.broadcast_in_dim(row, (rows, chunk), [1]), layout)

    def products_with_keys(slot):
        def multiply(total):
            plgpu.wgmma(total, q, scratch.keys.at[slot, 0].T)
            return total[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((rows, chunk), jnp.float32))

    def add_values(total, weights, slot):
        values = scratch.values.at[slot, 0]
        if scratch.weights is None:
            return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(
                plgpu.WGMMAAccumulatorRef.init(total)
            )
        scratch.weights[threads] = weights
        plgpu.commit_smem()

        def multiply(product):
            plgpu.wgmma(product, scratch.weights.at[threads], values)
            return product[...]

        return total + pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((rows, value_size), jnp.float32))

    def add_chunk(masked, index, state):
        weighted, top, total = state
        slot = lax.rem(index, jnp.int32(UNPACKED_STAGES))
        plgpu.barrier_wait(scratch.unpacked.at[slot])
        products = products_with_keys(slot)
        if (key_scales := scales_of(slot, 0)) is not None:
            products = products * key_scales
        scores = scaled_scores(products, settings)
        if masked:
            first_row = view.position * plan.group + threads * GROUP_ROWS
            start = view.chunk_start(index, chunking)
            visible = visible_slots((rows, chunk), layout, first_row, start, plan.group, settings)
            scores = jnp.where(visible, scores, HIDDEN)
        new_top = jnp.maximum(top, scores.max(axis=1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - across(new_top, chunk))
        total = total * shrink + weights.sum(axis=1)
        if (value_scales := scales_of(slot, 1)) is not None:
            weights = weights * value_scales
        weighted = add_values(weighted * across(shrink, value_size), weights.astype(jnp.bfloat16), slot)
        plgpu.barrier_arrive(scratch.consumed.at[slot])
        return weighted, new_top, total

    state = (filled((rows, value_size), 0), filled((rows,), HIDDEN), filled((rows,), 0))
    bounds = _unmasked_chunks(view, chunking)
    if settings.span is not None:
        state = lax.fori_loop(0, bounds.begin, partial(add_chunk, True), state)
    state = lax.fori_loop(bounds.begin, bounds.end, partial(add_chunk, False), state)
    weighted, top, total = lax.fori_loop(bounds.end, view.chunks, partial(add_chunk, True), state)
    scratch.mass[threads] = mass_of(top, total)
    mean = q if scratch.mean is None else scratch.mean.at[threads]
    mean[...] = (weighted / across(jnp.where(total > 0, total, 1.0), value_size)).astype(jnp.bfloat16)


class _Range(NamedTuple):
    begin: jax.Array
    end: jax.Array


def _unmasked_chunks(view: TileView, chunking: Chunking) -> _Range:
    """The chunks of which every query of the tile sees every token."""
    chunk = jnp.int32(chunking.chunk)
    origin = view.chunk_start(jnp.int32(0), chunking)
    last_query = view.stop - 1
    hidden = jnp.maximum(chunking.settings.first_visible(last_query) - origin, 0)
    begin = jnp.minimum(pl.cdiv(hidden, chunk), view.chunks)
    end = lax.div(view.position + 1 - origin, chunk)
    return _Range(begin, jnp.clip(end, begin, view.chunks))
