import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrent import StateLayout
from pallas_kernels.recurrent.state_place import StatePlace

ONE, MINUS_TWO = 0x3F80, 0xC000  # bfloat16


def layout_of(*shapes: tuple[int, ...], dtypes: tuple[str, ...], page_rows: int = 8) -> StateLayout:
    return StateLayout(shapes=shapes, dtypes=dtypes, page_rows=page_rows)


def test_channels_are_next_to_each_other():
    """Mamba 1's `[C, N]` is stored `[N, C]`."""
    layout = layout_of((3, 2), dtypes=("float32",))
    words = layout.pack((jnp.arange(6.0).reshape(3, 2),))
    np.testing.assert_array_equal(np.asarray(words[:6]).view(np.float32), [0, 2, 4, 1, 3, 5])


def test_heads_lie_side_by_side_until_they_fill_the_lanes():
    layout = layout_of((4, 64, 16), dtypes=("float32",), page_rows=64)
    assert layout.stored_shape(0) == (2, 16, 128)
    value = np.zeros((4, 64, 16), np.float32)
    value[3, 5, 7] = 1  # the second head of the second block, key row 7
    words = np.asarray(layout.pack((jnp.asarray(value),)))
    assert np.flatnonzero(words).tolist() == [(1 * 16 + 7) * 128 + 64 + 5]
    assert layout_of((3, 64, 16), dtypes=("float32",)).stored_shape(0) == (3, 16, 64)
    assert layout_of((2, 128, 128), dtypes=("float32",)).stored_shape(0) == (2, 128, 128)
    assert layout_of((7,), dtypes=("float32",)).stored_shape(0) == (1, 1, 7)


@pytest.mark.parametrize(
    ("shape", "low", "high"),
    [
        ((4, 128, 2), (0, 9, 1), (1, 9, 1)),  # an even block and the next one
        ((6, 4), (5, 2), (5, 3)),  # an even row and the next one
        ((6, 3), (1, 2), (4, 2)),  # the two halves of one row
        ((5, 1), (1, 0), (4, 0)),  # the two halves of the part
    ],
)
def test_two_bfloat16_share_a_word(shape, low, high):
    layout = layout_of(shape, dtypes=("bfloat16",))
    value = np.zeros(shape, np.float32)
    value[low], value[high] = 1.0, -2.0
    words = np.asarray(layout.pack((jnp.asarray(value),)))
    assert words[words != 0].tolist() == [MINUS_TWO << 16 | ONE]


def test_the_largest_part_comes_first_and_parts_start_on_tiles_rows_or_words():
    jamba = layout_of((8192, 3), (8192, 16), dtypes=("bfloat16", "float32"), page_rows=128)
    assert jamba.num_pages == 9
    assert jamba.parts == ((131072, 12288), (0, 131072))
    rows = layout_of((128, 4), (128, 9), dtypes=("float32", "float32"), page_rows=8)
    assert rows.num_pages == 2
    assert rows.parts == ((1152, 512), (0, 1152))
    words = layout_of((100, 1), (924, 1), dtypes=("float32", "float32"), page_rows=8)
    assert words.num_pages == 1
    assert words.parts == ((924, 100), (0, 924))


@pytest.mark.parametrize("page_rows", [8, 40])
def test_a_packed_state_unpacks_to_the_same(page_rows):
    layout = layout_of(
        (37, 3),
        (5, 16, 8),
        (9,),
        (300, 4),
        dtypes=("bfloat16", "float32", "bfloat16", "bfloat16"),
        page_rows=page_rows,
    )
    rng = np.random.default_rng(0)
    parts = zip(layout.shapes, layout.dtypes, strict=True)
    values = tuple(jnp.asarray(rng.normal(size=(2, *shape)), dtype) for shape, dtype in parts)
    words = layout.pack(values)
    assert words.shape == (2, layout.num_pages * page_rows * 128)
    for value, again in zip(values, layout.unpack(words), strict=True):
        assert again.dtype == value.dtype
        np.testing.assert_array_equal(again, value)


def test_pages_of_a_layer_run_on_through_the_slots_of_its_blocks():
    layout = layout_of((1024, 5), dtypes=("float32",))
    place = StatePlace(layout=layout, part=0, layer_slot=1, layer_slots=3)
    blocks = jnp.asarray([[10, 20], [7, 8]])
    np.testing.assert_array_equal(place.page_ids(blocks), [[31, 32, 60, 61, 62], [22, 23, 24, 25, 26]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shapes": ()}, "as many shapes as dtypes, and one"),
        ({"shapes": ((2, 0),)}, r"1 to 3 axes of positive size, got \(2, 0\)"),
        ({"shapes": ((2, 2, 2, 2),)}, "1 to 3 axes"),
        ({"dtypes": ("int8",)}, "got 'int8'"),
        ({"page_rows": 12}, "multiple of 8, got 12"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        StateLayout(**({"shapes": ((4, 3),), "dtypes": ("float32",), "page_rows": 8} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"part": 1}, r"part must be in \[0, 1\), got 1"),
        ({"layer_slot": -1}, "layer_slot must be at least 0, got -1"),
        ({"layer_slots": 0}, "layer_slots must be at least 1, got 0"),
    ],
)
def test_a_place_that_cannot_be_is_refused(change, message):
    layout = layout_of((4, 3), dtypes=("float32",))
    with pytest.raises(ValueError, match=message):
        StatePlace(**({"layout": layout, "part": 0, "layer_slot": 0, "layer_slots": 1} | change))
