"""Sizes of the kernels' calls, from what fits a multiprocessor."""

from typing import NamedTuple

import jax

from pallas_kernels.batch import GroupTable
from pallas_kernels.gpu.live_pages import Chunking
from pallas_kernels.gpu.terms import count_terms
from pallas_kernels.gpu.tile_kernel import MMA_ROWS, TilePlan, count_mean_terms
from pallas_kernels.gpu.token_words import padded_values
from pallas_kernels.gpu.wgmma_kernel import TILE_ROWS, UNPACKED_STAGES, WgmmaPlan
from pallas_kernels.layout import AttentionPageLayout
from pallas_kernels.settings import AttentionSettings

SHARED_BYTES = 227 << 10  # that one block may have, on Hopper and Blackwell
SMALL_BYTES = 3 << 10  # room for barriers, reductions and masses
BLOCKS_WANTED = 264  # two for each of a Hopper GPU's 132 multiprocessors
MOST_SPLITS = 32
BUFFERS = ((64, 2), (32, 2), (64, 1), (32, 1))  # tokens of a chunk and buffers, the best first
MOST_ROWS = 64  # query rows (tokens x query heads) of an mma tile
FEW_ROWS = 32  # the same where 64 spill registers: several terms a number, or more lanes of V than FEW_LANES
FEW_LANES = 128


class TooManyRowsError(ValueError):
    """No buffers leave the smallest tile enough shared memory."""


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

    Raises TooManyRowsError where not even a tile of 16 rows fits.
    """
    tile = _largest_tile(settings, group, dtype)
    heads = settings.layout.num_kv_heads * tile.head_tiles
    most = table.block_ids.shape[1] * settings.layout.block_size
    if settings.span is not None:
        most = min(most, settings.span)
    wanted = round(BLOCKS_WANTED / (sequences * heads))
    splits = max(min(wanted, most // (tile.buffers.chunk * tile.buffers.stages), MOST_SPLITS), 1)
    return DecodePlan(_whole_tiles(tile.group), _tile_call(settings, tile, splits))


def plan_prefill(
    settings: AttentionSettings, group: int, dtype: jax.typing.DTypeLike, capability: float | None
) -> PrefillPlan:
    """The call for prefill tiles: wgmma where GPU, page and queries allow it, else 16-row mma.

    Raises TooManyRowsError where not even a tile of 16 rows fits.
    """
    if capability is not None and int(capability) == 9 and _is_for_wgmma(settings, dtype):
        mine = max(d for d in _divisors(group) if d <= TILE_ROWS)
        for buffers in map(Buffers._make, BUFFERS):
            if wgmma_bytes(settings, buffers) <= SHARED_BYTES:
                chunking = Chunking(settings=settings, **buffers._asdict())
                call = WgmmaPlan(group=mine, head_tiles=group // mine, chunking=chunking)
                return PrefillPlan(TILE_ROWS // mine, TILE_ROWS, call)
    tile = _largest_tile(settings, group, dtype)
    rows, buffers, most = _whole_tiles(tile.group), tile.buffers, _most_rows(settings, dtype)
    while 2 * rows <= most and (for_more := _tile_buffers(settings, 2 * rows, dtype)) is not None:
        rows, buffers = 2 * rows, for_more
    call = _tile_call(settings, tile._replace(buffers=buffers), 1)
    return PrefillPlan(rows // tile.group, rows, call)


def tile_bytes(settings: AttentionSettings, rows: int, dtype: jax.typing.DTypeLike, buffers: Buffers) -> int:
    """Shared memory of a block of `attend_tiles`, its means in as many terms as splits need."""
    layout = settings.layout
    terms, q_terms = count_terms(layout.dtype), count_terms(dtype)
    mean_terms = count_mean_terms(q_terms, MOST_SPLITS)
    weights = max(terms, q_terms) * rows * buffers.chunk * 2
    queries = q_terms * rows * layout.head_size * 2
    means = mean_terms * rows * padded_values(layout) * 2
    unpacked = terms * _unpacked_bytes(layout, buffers.chunk, padded_values(layout))
    return _buffer_bytes(layout, buffers) + unpacked + weights + queries + means + SMALL_BYTES


def wgmma_bytes(settings: AttentionSettings, buffers: Buffers) -> int:
    """Shared memory of a block of `attend_wide_tiles`."""
    layout = settings.layout
    unpacked = UNPACKED_STAGES * _unpacked_bytes(layout, buffers.chunk, layout.value_size)
    means = 0 if layout.value_size == layout.head_size else layout.value_size
    queries_and_means = TILE_ROWS * (layout.head_size + means) * 2
    return _buffer_bytes(layout, buffers) + unpacked + queries_and_means + SMALL_BYTES


def _buffer_bytes(layout: AttentionPageLayout, buffers: Buffers) -> int:
    """Of the words of chunks."""
    return buffers.stages * buffers.chunk * sum(layout.token_words) * 4


def _unpacked_bytes(layout: AttentionPageLayout, chunk: int, value_size: int) -> int:
    """Of one term of a chunk's K and V; those of latents are one."""
    return chunk * (layout.head_size + (0 if layout.latent else value_size)) * 2


def _is_for_wgmma(settings: AttentionSettings, dtype: jax.typing.DTypeLike) -> bool:
    """Whether pages and queries are one term a number, and no latents: sums over those fit no registers."""
    layout = settings.layout
    return count_terms(layout.dtype) == count_terms(dtype) == 1 and not layout.latent


class _Tile(NamedTuple):
    """Query heads of a tile, tiles that share a KV head, and the buffers."""

    group: int
    head_tiles: int
    buffers: Buffers


def _largest_tile(settings: AttentionSettings, group: int, dtype: jax.typing.DTypeLike) -> _Tile:
    """The most query heads of a KV head that one tile has room for."""
    for mine in sorted(_divisors(group), reverse=True):
        rows = _whole_tiles(mine)
        buffers = _tile_buffers(settings, rows, dtype)
        if rows <= _most_rows(settings, dtype) and buffers is not None:
            return _Tile(mine, group // mine, buffers)
    layout = settings.layout
    raise TooManyRowsError(
        f"{MMA_ROWS} queries over K of {layout.head_size} and V of {layout.value_size} in {layout.dtype} "
        f"need more than {SHARED_BYTES} bytes of shared memory"
    )


def _most_rows(settings: AttentionSettings, dtype: jax.typing.DTypeLike) -> int:
    """Rows of a tile that spills no registers."""
    layout = settings.layout
    one_term = count_terms(layout.dtype) == count_terms(dtype) == 1
    return MOST_ROWS if one_term and layout.value_size <= FEW_LANES else FEW_ROWS


def _tile_call(settings: AttentionSettings, tile: _Tile, splits: int) -> TilePlan:
    chunking = Chunking(settings=settings, **tile.buffers._asdict())
    return TilePlan(group=tile.group, head_tiles=tile.head_tiles, chunking=chunking, splits=splits)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _whole_tiles(rows: int) -> int:
    """The rows of a tile with room for so many: 16, doubled as often as that takes."""
    whole = MMA_ROWS
    while whole < rows:
        whole *= 2
    return whole


def _tile_buffers(settings: AttentionSettings, rows: int, dtype: jax.typing.DTypeLike) -> Buffers | None:
    """The best buffers of which two blocks fit a multiprocessor, else of which one does, else None."""
    for room in (SHARED_BYTES // 2, SHARED_BYTES):
        for buffers in map(Buffers._make, BUFFERS):
            if tile_bytes(settings, rows, dtype, buffers) <= room:
                return buffers
    return None
