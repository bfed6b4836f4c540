"""Sizes of the prefill kernel: rows of a tile, and what its chunks cover."""

import jax.numpy as jnp
import pytest

from pallas_kernels import AttentionPageLayout
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu import prefill_plan


def plan_of(heads: int, group: int, head_size: int = 128, window: int | None = None, block_size: int = 128):
    layout = AttentionPageLayout.fitting(
        block_size=block_size, num_kv_heads=heads, head_size=head_size, dtype="bfloat16"
    )
    settings = AttentionSettings(layout=layout, layer_slot=0, layer_slots=1, sliding_window=window)
    return prefill_plan.plan_prefill(
        settings, group=group, tokens=2048, table_width=8192 // block_size, dtype=jnp.dtype("bfloat16")
    )


@pytest.mark.parametrize(
    ("heads", "group", "head_size", "queries"),
    [
        (1, 16, 128, 128),  # 2,048 rows
        (2, 8, 64, 128),  # 2,048 rows, half of them for the second token of a row of words
        (4, 2, 128, 512),  # 1,024 rows of each of 4 heads
        (8, 4, 128, 256),  # 1,024 rows of each of 8
        (16, 4, 128, 128),  # 512 rows of each of 16
        (2, 5, 128, 342),  # six tiles of one size in 2,048 tokens, none of 409
        (1, 1, 128, 512),  # no longer, whatever rows are free
    ],
)
def test_rows_of_a_tile_are_limited_for_one_head_and_for_all(heads, group, head_size, queries):
    assert plan_of(heads, group, head_size).tile == queries


@pytest.mark.parametrize(
    ("window", "group", "block_size", "tile", "pages"),
    [
        (1024, 2, 128, 512, 6),  # 512 queries see 1,535 tokens, 12 pages: two chunks
        (512, 4, 16, 256, 48),  # half a window; 767 tokens
        (128, 8, 128, 128, 2),  # 255 tokens
        (300, 4, 16, 147, 32),  # 14 tiles; 446 tokens are 28 pages, whose scores are four tiles of 128 lanes
        (4000, 8, 128, 256, 7),  # 4,255 tokens, 34 pages: five chunks
    ],
)
def test_what_a_tile_sees_of_a_window_is_cut_into_chunks_of_one_size(window, group, block_size, tile, pages):
    plan = plan_of(2, group, window=window, block_size=block_size)
    assert (plan.tile, plan.blocks) == (tile, pages)


def test_a_narrow_matrix_unit_has_chunks_of_fewer_tokens_where_rows_hold_one(monkeypatch):
    monkeypatch.setattr(prefill_plan, "matrix_width", lambda: 128)
    assert plan_of(4, 2).blocks * 128 == 512
    assert plan_of(2, 8, head_size=64).blocks * 128 == 1024


def test_rows_and_pages_take_their_share_of_a_small_vmem(monkeypatch):
    """16 MiB as on a v4. A row of a head takes 2 x 256 bytes as q and as a result, 512 as two bfloat16, 1,024
    as tops, 512 as a top and 1,024 as sums: 4 KiB. 16 heads of 128 rows are 8 MiB. Two pages are 2 MiB.
    """
    monkeypatch.setattr(prefill_plan, "vmem_capacity", lambda: 16 << 20)
    plan = plan_of(16, 2)
    assert (plan.tile, plan.blocks) == (64, 2)
    assert plan.math.place_rows * plan.math.row_bytes == 8 << 20


def test_large_pages_make_a_chunk_of_512_tokens():
    assert plan_of(16, 2).blocks * 128 == 512
    assert plan_of(8, 2).blocks * 128 == 512
    assert plan_of(4, 2).blocks * 128 == 1024


def test_vmem_asked_for_has_room_for_every_buffer():
    """Of 4 heads of 1,024 rows: 16 MiB of rows; K twice side by side and V with its ones, 256 lanes of 1,024
    tokens each, and 256 rows of scores and of what sums shrink by, two each; two buffers of 8 pages.
    """
    plan = plan_of(4, 2)
    rows, operands, scores, shrinks, pages = 16 << 20, 4 * 1024 * 256 * 2, 2 << 20, 256 << 10, 16 * 65536 * 4
    assert (plan.math.block_rows, plan.math.units) == (256, 1024)
    assert plan.vmem_bytes - prefill_plan.VMEM_SLACK == rows + operands + scores + shrinks + pages


@pytest.mark.parametrize(("group", "rows", "counts"), [(2, 1024, [256] * 4), (5, 1712, [256] * 6 + [176])])
def test_a_tile_is_cut_into_blocks_of_rows_the_last_of_which_is_shorter(group, rows, counts):
    maths = plan_of(2, group).math
    assert maths.place_rows == rows
    assert [block.size for block in maths.blocks()] == counts * 2
    assert [block.rows.start for block in maths.blocks()] == [256 * index for index in range(len(counts))] * 2
