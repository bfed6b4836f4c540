"""Sizes of the kernel's calls, from what fits a multiprocessor."""

from typing import NamedTuple

import jax

from pallas_kernels.batch import GroupTable
from pallas_kernels.gpu.terms import FLOAT32_TERMS, count_terms
from pallas_kernels.gpu.tile_kernel import MMA_ROWS, TilePlan
from pallas_kernels.settings import AttentionSettings

SHARED_BYTES = 227 << 10  # that one block may have, on Hopper and Blackwell
BLOCKS_WANTED = 264  # two for each of a Hopper GPU's 132 multiprocessors
MOST_SPLITS = 32
BUFFERS = ((64, 2), (32, 2), (64, 1), (32, 1))  # tokens of a chunk and buffers, the best first
PREFILL_ROWS = (64, 32, 16)  # query rows (tokens x group) of a tile, about
FEW_LANES = 128  # of a head: more, or float32, and 64 rows spill registers


class Buffers(NamedTuple):
    """Tokens of a chunk, and how many chunks are in flight or in use."""

    chunk: int
    stages: int


class PrefillPlan(NamedTuple):
    """Queries of a tile, and the call."""

    size: int
    plan: TilePlan


def plan_decode(
    settings: AttentionSettings,
    group: int,
    shape: tuple[int, ...],
    table: GroupTable,
    dtype: jax.typing.DTypeLike,
) -> TilePlan:
    """The call for decode tiles `[N, Hkv, rows, D]`: split where there are too few of them for a GPU."""
    tiles, heads, rows, _ = shape
    buffers = _buffers(settings, rows, dtype)
    if buffers is None:
        raise ValueError(
            f"{rows} rows of {settings.layout} need more than {SHARED_BYTES} bytes of shared memory"
        )
    most = table.block_ids.shape[1] * settings.layout.block_size
    if settings.span is not None:
        most = min(most, settings.span)
    splits = min(
        round(BLOCKS_WANTED / (tiles * heads)), most // (buffers.chunk * buffers.stages), MOST_SPLITS
    )
    return TilePlan(
        settings=settings, group=group, chunk=buffers.chunk, stages=buffers.stages, splits=max(splits, 1)
    )


def plan_prefill(settings: AttentionSettings, group: int, dtype: jax.typing.DTypeLike) -> PrefillPlan:
    """The call for prefill tiles of as many rows as registers and shared memory hold."""
    layout = settings.layout
    one_term = count_terms(layout.dtype) == count_terms(dtype) == 1
    light = one_term and layout.head_size <= FEW_LANES
    for most in PREFILL_ROWS if light else PREFILL_ROWS[1:]:
        size = max(most // group, 1)
        buffers = _buffers(settings, -(-size * group // MMA_ROWS) * MMA_ROWS, dtype)
        if buffers is not None:
            plan = TilePlan(
                settings=settings, group=group, chunk=buffers.chunk, stages=buffers.stages, splits=1
            )
            return PrefillPlan(size, plan)
    raise ValueError(f"{group} rows of {layout} need more than {SHARED_BYTES} bytes of shared memory")


def _buffers(settings: AttentionSettings, rows: int, dtype: jax.typing.DTypeLike) -> Buffers | None:
    """The best buffers of which two blocks fit a multiprocessor, else of which one does, else None."""
    for room in (SHARED_BYTES // 2, SHARED_BYTES):
        for buffers in map(Buffers._make, BUFFERS):
            if shared_bytes(settings, rows, dtype, buffers) <= room:
                return buffers
    return None


def shared_bytes(
    settings: AttentionSettings, rows: int, dtype: jax.typing.DTypeLike, buffers: Buffers
) -> int:
    """Shared memory of a block, as `attend_tiles` takes it, with room for barriers and reductions."""
    layout = settings.layout
    terms, q_terms = count_terms(layout.dtype), count_terms(dtype)
    words = buffers.stages * layout.planes * buffers.chunk * layout.head_size * 4
    unpacked = 2 * terms * buffers.chunk * layout.head_size * 2
    weights = max(terms, q_terms) * rows * buffers.chunk * 2
    queries_and_means = (q_terms + FLOAT32_TERMS) * rows * layout.head_size * 2
    return words + unpacked + weights + queries_and_means + (3 << 10)
