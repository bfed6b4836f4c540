"""The kernel for tiles of few rows: 16-row `mma`s over pages that come by TMA, with an online softmax.

A block of 128 threads serves one tile of queries of one KV head, and one split of the pages they see. It runs
on every GPU that has TMA (Hopper and later).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.shared_memory import TILE_LANES, swizzled
from pallas_kernels.gpu.terms import FLOAT32_TERMS, add_products, count_terms, keys_values_of, terms_of
from pallas_kernels.settings import AttentionSettings

HIDDEN = -1e30  # a masked score: exp2 gives 0, and a difference of two of them is not NaN
LOG2_E = 1.4426950408889634
MMA_ROWS = 16
UNPACKED_WORDS = 4096  # unpacked at a time: 32 registers a thread


@dataclass(frozen=True, kw_only=True)
class TilePlan:
    """Static sizes of a call.

    Query heads of a KV head, tokens of a chunk, chunks in flight or in use, splits of what a tile sees.
    """

    settings: AttentionSettings
    group: int
    chunk: int
    stages: int
    splits: int

    @property
    def piece(self) -> int:
        """Tokens of one copy: pieces fill both a page and a chunk."""
        return math.gcd(self.settings.layout.block_size, self.chunk)


class TileScalars(NamedTuple):
    """What steers the kernel, int32 in device memory.

    layer_slot `[1]`; seq, position, num_queries `[N]`: the tiles' schedule; first_block `[S]`; block_ids
    `[S, W]`.
    """

    layer_slot: jax.Array
    seq: jax.Array
    position: jax.Array
    num_queries: jax.Array
    first_block: jax.Array
    block_ids: jax.Array


class Parts(NamedTuple):
    """What each split saw.

    mean  `[N, Hkv, splits, terms, rows, D]` weighted means as sums of bfloat16 terms
    mass  `[N, Hkv, splits, rows]`           float32, the logarithm to base 2 of the sum of exponentials of
                                             scores: about -1e30 where a row saw nothing
    """

    mean: jax.Array
    mass: jax.Array


def attend_tiles(
    scalars: TileScalars, q: jax.Array, pages: jax.Array, plan: TilePlan, *, interpret: Any = None
) -> Parts:
    """Attention of tiles by splits, over `pages uint32[pages, page words / D, D]`.

    `q [N, Hkv, terms, rows, D]` are queries as sums of bfloat16 terms.
    """
    tiles, heads, q_terms, rows, head_size = q.shape
    layout = plan.settings.layout
    terms = count_terms(layout.dtype)
    mean_terms = 1 if plan.splits == 1 and q_terms == 1 else FLOAT32_TERMS
    shape = (tiles, heads, plan.splits, rows)
    parts = plgpu.kernel(
        partial(_kernel, plan, interpret is not None),
        out_type=(
            jax.ShapeDtypeStruct((*shape[:3], mean_terms, rows, head_size), jnp.bfloat16),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        scratch_types=[
            swizzled((q_terms, rows, head_size), jnp.bfloat16),
            swizzled((plan.stages, layout.planes, plan.chunk, head_size), jnp.uint32),
            swizzled((terms, plan.chunk, head_size), jnp.bfloat16),
            swizzled((terms, plan.chunk, head_size), jnp.bfloat16),
            swizzled((max(q_terms, terms), rows, plan.chunk), jnp.bfloat16),
            swizzled((mean_terms, rows, head_size), jnp.bfloat16),
            plgpu.SMEM((rows,), jnp.float32),
            plgpu.Barrier(num_arrivals=q_terms),
            plgpu.Barrier(num_barriers=plan.stages, num_arrivals=plan.chunk // plan.piece * layout.planes),
        ],
        grid=(tiles, heads, plan.splits),
        grid_names=("tile", "head", "split"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(*scalars, q, pages)
    return Parts(*parts)


def _kernel(
    plan: TilePlan,
    interpreted: bool,
    layer_slot_ref,
    seq_ref,
    position_ref,
    num_queries_ref,
    first_block_ref,
    block_ids_ref,
    q_ref,
    pages_ref,
    mean_ref,
    mass_ref,
    q_smem,
    buffers,
    keys_smem,
    values_smem,
    weights_smem,
    mean_smem,
    mass_smem,
    q_barrier,
    barriers,
) -> None:
    settings, chunk = plan.settings, plan.chunk
    layout = settings.layout
    _, rows, head_size = q_smem.shape
    tile, head, split = (lax.axis_index(name) for name in ("tile", "head", "split"))
    m_warps = min(rows // MMA_ROWS, 4)
    left, right, sums = (
        of(jnp.bfloat16, m_warps=m_warps)
        for of in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )

    def add_product(total, a, b):
        if interpreted:  # the interpreter has no rule for `mma`
            return total + jnp.dot(a, b, preferred_element_type=jnp.float32)
        return plgpu.mma(total, a, b)

    def filled(shape, value):
        return plgpu.layout_cast(
            jnp.full(shape, value, jnp.float32), sums if len(shape) == 2 else sums.reduce(1)
        )

    def across(column, size):
        """`[rows]` repeated to `[rows, size]`."""
        return plgpu.layout_cast(lax.broadcast_in_dim(column, (rows, size), [0]), sums)

    seq, position, num_queries = seq_ref[tile], position_ref[tile], num_queries_ref[tile]
    first_block, layer_slot = first_block_ref[seq], layer_slot_ref[0]
    start, stop = settings.first_visible(position), position + num_queries
    pieces, piece_tokens = chunk // plan.piece, jnp.int32(plan.piece)
    first = lax.div(start, piece_tokens)
    last = jnp.where(num_queries > 0, pl.cdiv(stop, piece_tokens), first)
    chunks = pl.cdiv(last - first, jnp.int32(pieces))
    share = pl.cdiv(chunks, jnp.int32(plan.splits))
    begin, end = split * share, jnp.minimum((split + 1) * share, chunks)

    def fetch(index):
        """Starts the copies of a chunk's live pieces."""
        slot = lax.rem(index - begin, jnp.int32(plan.stages))
        pieces_of_page = jnp.int32(layout.block_size // plan.piece)
        for part in range(pieces):
            piece = first + index * pieces + part

            @pl.when(piece < last)
            def _(part=part, piece=piece):
                block = block_ids_ref[seq, lax.div(piece, pieces_of_page) - first_block]
                page = block * settings.layer_slots + layer_slot
                for plane in range(layout.planes):
                    row = (head * layout.planes + plane) * layout.block_size
                    row += lax.rem(piece, pieces_of_page) * plan.piece
                    plgpu.copy_gmem_to_smem(
                        pages_ref.at[page, pl.ds(row, plan.piece)],
                        buffers.at[slot, plane, pl.ds(part * plan.piece, plan.piece)],
                        barriers.at[slot],
                    )

            @pl.when(piece >= last)
            def _():
                for _ in range(layout.planes):
                    plgpu.barrier_arrive(barriers.at[slot])

    for term in range(q_smem.shape[0]):
        plgpu.copy_gmem_to_smem(q_ref.at[tile, head, term], q_smem.at[term], q_barrier)
    for index in range(plan.stages):
        pl.when(begin + index < end)(partial(fetch, begin + index))
    plgpu.barrier_wait(q_barrier)

    def unpack(slot, base):
        """The terms of a chunk's K and V to shared memory; V is 0 outside the live positions."""
        size = min(UNPACKED_WORDS // head_size, chunk)
        copied = plgpu.Layout.SMEM_GMEM_COPY((size, head_size), jnp.uint32, 128)
        for piece in range(0, chunk, size):
            at = pl.ds(piece, size)
            planes = [plgpu.load(buffers.at[slot, p, at], layout=copied) for p in range(layout.planes)]
            keys, values = keys_values_of(planes, layout)
            token = base + piece + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=copied)
            values = jnp.where((token >= start) & (token < stop), values, 0.0)
            for x, ref in ((keys, keys_smem), (values, values_smem)):
                for index, term in enumerate(terms_of(x, ref.shape[0])):
                    ref[index, at] = term

    def terms_in(ref):
        return [ref.at[term] for term in range(ref.shape[0])]

    def scores_of_chunk():
        """Products of queries and keys, `[rows, chunk]`, a few lanes of the heads at a time."""
        total = filled((rows, chunk), 0)
        for lane in range(0, head_size, TILE_LANES):
            at = pl.ds(lane, TILE_LANES)
            q = [plgpu.load(ref.at[:, at], layout=left) for ref in terms_in(q_smem)]
            keys = [plgpu.load(ref.at[:, at].T, layout=right) for ref in terms_in(keys_smem)]
            total = add_products(total, q, keys, add_product)
        return total

    def add_values(total):
        """`total` plus the products of weights and values, a few tokens at a time."""
        for token in range(0, chunk, TILE_LANES):
            at = pl.ds(token, TILE_LANES)
            weights = [plgpu.load(ref.at[:, at], layout=left) for ref in terms_in(weights_smem)]
            values = [plgpu.load(ref.at[at], layout=right) for ref in terms_in(values_smem)]
            total = add_products(total, weights, values, add_product)
        return total

    def add_chunk(index, state):
        weighted, top, total = state
        slot = lax.rem(index - begin, jnp.int32(plan.stages))
        base = (first + index * pieces) * plan.piece
        plgpu.barrier_wait(barriers.at[slot])
        unpack(slot, base)
        plgpu.commit_smem()  # every warp has read the buffer: it may be filled again
        pl.when(index + plan.stages < end)(lambda: fetch(index + plan.stages))

        scores = scores_of_chunk()
        if settings.softcap is None:
            scores = scores * (settings.scale * LOG2_E)
        else:
            scores = jnp.tanh(scores * (settings.scale / settings.softcap)) * (settings.softcap * LOG2_E)
        slot_position = base + plgpu.broadcasted_iota(jnp.int32, (rows, chunk), 1, layout=sums)
        row = plgpu.broadcasted_iota(jnp.int32, (rows, chunk), 0, layout=sums)
        row_position = position + lax.div(row, jnp.int32(plan.group))
        visible = (slot_position <= row_position) & (slot_position >= settings.first_visible(row_position))
        scores = jnp.where(visible, scores, HIDDEN)

        new_top = jnp.maximum(top, scores.max(axis=1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - across(new_top, chunk))
        total = total * across(shrink, chunk) + weights
        for term, part in enumerate(terms_of(weights, weights_smem.shape[0])):
            weights_smem[term] = part
        plgpu.commit_smem()
        weighted = add_values(weighted * across(shrink, head_size))
        return weighted, new_top, total

    empty = (filled((rows, head_size), 0), filled((rows,), HIDDEN), filled((rows, chunk), 0))
    weighted, top, total = lax.fori_loop(begin, end, add_chunk, empty)
    total = total.sum(axis=1)
    mass_smem[...] = jnp.where(total > 0, top + jnp.log2(total), HIDDEN)
    mean = weighted / across(jnp.where(total > 0, total, 1.0), head_size)
    for index, term in enumerate(terms_of(mean, mean_smem.shape[0])):
        mean_smem[index] = term
    plgpu.commit_smem()
    for index in range(mean_smem.shape[0]):
        plgpu.copy_smem_to_gmem(mean_smem.at[index], mean_ref.at[tile, head, split, index])
    plgpu.copy_smem_to_gmem(mass_smem, mass_ref.at[tile, head, split])
    plgpu.wait_smem_to_gmem(0)
