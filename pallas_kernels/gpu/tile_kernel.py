"""The kernel for tiles of few rows: 16-row `mma`s over pages that come by TMA, with an online softmax.

A block of 128 threads serves one tile of queries of one KV head, and one split of what they see. It runs on
every GPU that has TMA (Hopper and later).
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
from pallas_kernels.gpu.shared_memory import TILE_LANES, swizzled
from pallas_kernels.gpu.softmax import HIDDEN, mass_of, scaled_scores, visible_slots
from pallas_kernels.gpu.terms import FLOAT32_TERMS, add_products, count_terms, terms_of
from pallas_kernels.gpu.token_words import padded_values

MMA_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class TilePlan:
    """Static sizes of a call.

    Query heads of a tile, tiles that share a KV head, chunks, splits of what a tile sees.
    """

    group: int
    head_tiles: int
    chunking: Chunking
    splits: int


class Parts(NamedTuple):
    """What each split saw.

    mean  `[N, H, splits, terms, rows, Dv]` weighted means as sums of bfloat16 terms; H is KV heads times the
                                            tiles that share one
    mass  `[N, H, splits, rows]`            float32, the logarithm to base 2 of the sum of exponentials of
                                            scores: about -1e30 where a row saw nothing
    """

    mean: jax.Array
    mass: jax.Array


class _Scratch(NamedTuple):
    """Shared memory of a block; terms are the first axis of all but `buffers`, `mass` and the barriers.

    Latents have no `values`: theirs are the front of `keys`.
    """

    q: Any
    buffers: Any
    keys: Any
    weights: Any
    mean: Any
    mass: Any
    q_barrier: Any
    barriers: Any
    values: Any = None


def count_mean_terms(q_terms: int, splits: int) -> int:
    """Terms of means: more than queries have where parts of them are added up."""
    return min(q_terms + (splits > 1), FLOAT32_TERMS)


def attend_tiles(
    scalars: TileScalars, q: jax.Array, pages: jax.Array, plan: TilePlan, *, interpret: Any = None
) -> Parts:
    """Attention of tiles by splits, over the pool `pages uint32[pages, rows, 128]`.

    `q [N, H, terms, rows, D]` are queries as sums of bfloat16 terms.
    """
    tiles, heads, q_terms, rows, head_size = q.shape
    layout, chunk, lanes = plan.chunking.settings.layout, plan.chunking.chunk, plan.chunking.lanes
    terms = count_terms(layout.dtype)
    value_size = padded_values(layout)
    mean_terms = count_mean_terms(q_terms, plan.splits)
    shape = (tiles, heads, plan.splits)
    scratch = _Scratch(
        q=swizzled((q_terms, rows, head_size), jnp.bfloat16, lanes.keys),
        buffers=plan.chunking.buffers(),
        keys=swizzled((terms, chunk, head_size), jnp.bfloat16, lanes.keys),
        weights=swizzled((max(q_terms, terms), rows, chunk), jnp.bfloat16),
        mean=swizzled((mean_terms, rows, value_size), jnp.bfloat16),
        mass=plgpu.SMEM((rows,), jnp.float32),
        q_barrier=plgpu.Barrier(num_arrivals=q_terms),
        barriers=plan.chunking.barriers(),
    )
    if not layout.latent:
        scratch = scratch._replace(values=swizzled((terms, chunk, value_size), jnp.bfloat16, lanes.values))
    parts = plgpu.kernel(
        partial(_kernel, plan, interpret is not None),
        out_type=(
            jax.ShapeDtypeStruct((*shape, mean_terms, rows, value_size), jnp.bfloat16),
            jax.ShapeDtypeStruct((*shape, rows), jnp.float32),
        ),
        scratch_types=scratch,
        grid=shape,
        grid_names=("tile", "head", "split"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(*scalars, q, plan.chunking.views(pages))
    mean, mass = parts
    return Parts(mean[..., : layout.value_size], mass)


def _kernel(plan: TilePlan, interpreted: bool, *refs: Any) -> None:
    """`refs`: the scalars, q, the pool's views, mean and mass, scratch memory."""
    scalars, refs = TileScalars(*refs[: len(TileScalars._fields)]), refs[len(TileScalars._fields) :]
    q_ref, views, mean_ref, mass_ref = refs[:4]
    scratch = _Scratch(*refs[4:])
    tile, head, split = (lax.axis_index(name) for name in ("tile", "head", "split"))
    view = TileView.read(scalars, tile, plan.chunking)

    @pl.when(view.num_queries > 0)
    def _():
        for term in range(scratch.q.shape[0]):
            plgpu.copy_gmem_to_smem(q_ref.at[tile, head, term], scratch.q.at[term], scratch.q_barrier)
        stream = PageStream(
            chunking=plan.chunking,
            view=view,
            head=lax.div(head, jnp.int32(plan.head_tiles)),
            scalars=scalars,
            views=views,
            buffers=scratch.buffers,
            barriers=scratch.barriers,
        )
        _attend_split(plan, interpreted, stream, split, scratch)
        plgpu.commit_smem()
        for term in range(scratch.mean.shape[0]):
            plgpu.copy_smem_to_gmem(scratch.mean.at[term], mean_ref.at[tile, head, split, term])
        plgpu.copy_smem_to_gmem(scratch.mass, mass_ref.at[tile, head, split])
        plgpu.wait_smem_to_gmem(0)


def _attend_split(
    plan: TilePlan, interpreted: bool, stream: PageStream, split: jax.Array, scratch: _Scratch
) -> None:
    """Attention of a tile over a split of its chunks, into `scratch.mean` and `scratch.mass`."""
    chunking, view = plan.chunking, stream.view
    layout = chunking.settings.layout
    chunk, stages = chunking.chunk, jnp.int32(chunking.stages)
    _, rows, head_size = scratch.q.shape
    value_size = scratch.mean.shape[-1]
    key_lanes = min(head_size & -head_size, TILE_LANES)
    left, right, sums = (
        of(jnp.bfloat16, m_warps=min(rows // MMA_ROWS, 4))
        for of in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )
    share = pl.cdiv(view.chunks, jnp.int32(plan.splits))
    begin, end = split * share, jnp.minimum((split + 1) * share, view.chunks)

    def add_product(total, a, b):
        if interpreted:  # the interpreter has no rule for `mma`
            return total + jnp.dot(a, b, preferred_element_type=jnp.float32)
        return plgpu.mma(total, a, b)

    def filled(shape, value):
        kind = sums if len(shape) == 2 else sums.reduce(1)
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), kind)

    def across(column, size):
        """`[rows]` repeated to `[rows, size]`."""
        return plgpu.layout_cast(lax.broadcast_in_dim(column, (rows, size), [0]), sums)

    def down(row):
        """`[chunk]` repeated to `[rows, chunk]`."""
        return plgpu.layout_cast(lax.broadcast_in_dim(row, (rows, chunk), [1]), sums)

    def terms_in(ref):
        return [ref.at[term] for term in range(ref.shape[0])]

    def products_with_keys():
        """Of the queries, `[rows, chunk]`: some lanes of the heads at a time."""
        total = filled((rows, chunk), 0)
        for lane in range(0, head_size, key_lanes):
            at = pl.ds(lane, key_lanes)
            q = [plgpu.load(ref.at[:, at], layout=left) for ref in terms_in(scratch.q)]
            keys = [plgpu.load(ref.at[:, at].T, layout=right) for ref in terms_in(scratch.keys)]
            total = add_products(total, q, keys, add_product)
        return total

    def add_values(total):
        """`total [rows, Dv]` plus the products of weights and values: some tokens at a time."""
        refs = (
            [ref.at[:, pl.ds(0, value_size)] for ref in terms_in(scratch.keys)]
            if layout.latent
            else terms_in(scratch.values)
        )
        for token in range(0, chunk, TILE_LANES):
            at = pl.ds(token, TILE_LANES)
            weights = [plgpu.load(ref.at[:, at], layout=left) for ref in terms_in(scratch.weights)]
            values = [plgpu.load(ref.at[at], layout=right) for ref in refs]
            total = add_products(total, weights, values, add_product)
        return total

    def add_chunk(index, state):
        weighted, top, total = state
        slot = lax.rem(index - begin, stages)
        plgpu.barrier_wait(scratch.barriers.at[slot])
        stream.unpack(index, slot, scratch.keys, scratch.values)
        scales = stream.scales(index, slot, sums.reduce(0)) if layout.is_quantised else None
        plgpu.commit_smem()  # every warp has read the buffer: it may be filled again
        pl.when(index + stages < end)(lambda: stream.fetch(index + stages, slot))

        products = products_with_keys()
        if scales is not None:
            products = products * down(scales.keys)
        scores = scaled_scores(products, chunking.settings)
        start = view.chunk_start(index, chunking)
        visible = visible_slots(
            (rows, chunk), sums, view.position * plan.group, start, plan.group, chunking.settings
        )
        scores = jnp.where(visible, scores, HIDDEN)
        new_top = jnp.maximum(top, scores.max(axis=1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - across(new_top, chunk))
        total = total * across(shrink, chunk) + weights
        if scales is not None:
            weights = weights * down(scales.values)
        for term, part in enumerate(terms_of(weights, scratch.weights.shape[0])):
            scratch.weights[term] = part
        plgpu.commit_smem()
        return add_values(weighted * across(shrink, value_size)), new_top, total

    for slot in range(chunking.stages):
        pl.when(begin + slot < end)(partial(stream.fetch, begin + slot, jnp.int32(slot)))
    plgpu.barrier_wait(scratch.q_barrier)
    empty = (filled((rows, value_size), 0), filled((rows,), HIDDEN), filled((rows, chunk), 0))
    weighted, top, total = lax.fori_loop(begin, end, add_chunk, empty)

    total = total.sum(axis=1)
    scratch.mass[...] = mass_of(top, total)
    mean = weighted / across(jnp.where(total > 0, total, 1.0), value_size)
    for term, part in enumerate(terms_of(mean, scratch.mean.shape[0])):
        scratch.mean[term] = part
