"""Sizes of the kernels' calls, from what fits a multiprocessor."""

from typing import NamedTuple

import jax

from pallas_kernels.batch import GroupTable
from pallas_kernels.gpu.live_pages import Chunking
from pallas_kernels.gpu.terms import FLOAT32_TERMS, count_terms
from pallas_kernels.gpu.tile_kernel import MMA_ROWS, TilePlan
from pallas_kernels.gpu.wgmma_kernel import TILE_ROWS, UNPACKED_STAGES, WgmmaPlan
from pallas_kernels.settings import AttentionSettings

SHARED_BYTES = 227 << 10  # that one block may have, on Hopper and Blackwell
SMALL_BYTES = 3 << 10  # room for barriers, reductions and masses
BLOCKS_WANTED = 264  # two for each of a Hopper GPU's 132 multiprocessors
MOST_SPLITS = 32
BUFFERS = ((64, 2), (32, 2), (64, 1), (32, 1))  # tokens of a chunk and buffers, the best first
PREFILL_ROWS = (64, 32, 16)  # query rows (tokens x group) of an mma tile, about
FEW_LANES = 128  # of a head: with more, or float32, 64 rows spill registers


class TooManyRowsError(ValueError):
    """No buffers leave a tile of a group's query heads enough shared memory."""


class Buffers(NamedTuple):
    """Tokens of a chunk, and how many chunks are in flight or in use."""

    chunk: int
    stages: int


class DecodePlan(NamedTuple):
    """Rows of a tile, and the call."""

    rows: int
    call: TilePlan


class PrefillPlan(NamedTuple):
    """Queries and rows of a tile, and the call."""

    size: int
    rows: int
    call: TilePlan | WgmmaPlan


def plan_decode(
    settings: AttentionSettings,
    group: int,
    sequences: int,
    table: GroupTable,
    dtype: jax.typing.DTypeLike,
) -> DecodePlan:
    """The call for decode tiles: split where there are too few of them for a GPU.

    Raises TooManyRowsError where a group has too many query heads.
    """
    rows = _whole_tiles(group)
    buffers = _tile_buffers(settings, rows, dtype)
    if buffers is None:
        raise _too_large(settings, group)
    most = table.block_ids.shape[1] * settings.layout.block_size
    if settings.span is not None:
        most = min(most, settings.span)
    wanted = round(BLOCKS_WANTED / (sequences * settings.layout.num_kv_heads))
    splits = max(min(wanted, most // (buffers.chunk * buffers.stages), MOST_SPLITS), 1)
    chunking = Chunking(settings=settings, **buffers._asdict())
    return DecodePlan(rows, TilePlan(group=group, chunking=chunking, splits=splits))


def plan_prefill(
    settings: AttentionSettings, group: int, dtype: jax.typing.DTypeLike, capability: float | None
) -> PrefillPlan:
    """The call for prefill tiles: wgmma where GPU, page and queries allow it, else 16-row mma.

    Raises TooManyRowsError where a group has too many query heads.
    """
    layout = settings.layout
    one_term = count_terms(layout.dtype) == count_terms(dtype) == 1
    if capability is not None and int(capability) == 9 and one_term and group <= TILE_ROWS:
        for buffers in map(Buffers._make, BUFFERS):
            if wgmma_bytes(settings, buffers) <= SHARED_BYTES:
                chunking = Chunking(settings=settings, **buffers._asdict())
                return PrefillPlan(TILE_ROWS // group, TILE_ROWS, WgmmaPlan(group=group, chunking=chunking))
    light = one_term and layout.head_size <= FEW_LANES
    for most in PREFILL_ROWS if light else PREFILL_ROWS[1:]:
        size = max(most // group, 1)
        rows = _whole_tiles(size * group)
        buffers = _tile_buffers(settings, rows, dtype)
        if buffers is not None:
            chunking = Chunking(settings=settings, **buffers._asdict())
            return PrefillPlan(size, rows, TilePlan(group=group, chunking=chunking, splits=1))
    raise _too_large(settings, group)


def tile_bytes(settings: AttentionSettings, rows: int, dtype: jax.typing.DTypeLike, buffers: Buffers) -> int:
    """Shared memory of a block of `attend_tiles`."""
    layout = settings.layout
    terms, q_terms = count_terms(layout.dtype), count_terms(dtype)
    words = buffers.stages * layout.planes * buffers.chunk * layout.head_size * 4
    unpacked = 2 * terms * buffers.chunk * layout.head_size * 2
    weights = max(terms, q_terms) * rows * buffers.chunk * 2
    queries_and_means = (q_terms + FLOAT32_TERMS) * rows * layout.head_size * 2
    return words + unpacked + weights + queries_and_means + SMALL_BYTES


def wgmma_bytes(settings: AttentionSettings, buffers: Buffers) -> int:
    """Shared memory of a block of `attend_wide_tiles`."""
    head_size = settings.layout.head_size
    words = buffers.stages * buffers.chunk * head_size * 4
    unpacked = 2 * UNPACKED_STAGES * buffers.chunk * head_size * 2
    return words + unpacked + TILE_ROWS * head_size * 2 + SMALL_BYTES


def _whole_tiles(rows: int) -> int:
    return -(-rows // MMA_ROWS) * MMA_ROWS


def _tile_buffers(settings: AttentionSettings, rows: int, dtype: jax.typing.DTypeLike) -> Buffers | None:
    """The best buffers of which two blocks fit a multiprocessor, else of which one does, else None."""
    for room in (SHARED_BYTES // 2, SHARED_BYTES):
        for buffers in map(Buffers._make, BUFFERS):
            if tile_bytes(settings, rows, dtype, buffers) <= room:
                return buffers
    return None


def _too_large(settings: AttentionSettings, rows: int) -> TooManyRowsError:
    return TooManyRowsError(
        f"{rows} query heads of a KV head of {settings.layout.head_size} need more than {SHARED_BYTES} bytes "
        f"of shared memory"
    )
