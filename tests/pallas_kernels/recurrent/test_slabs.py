"""How much of a state of matrices a TPU's decode kernel has in VMEM."""

import pytest

from pallas_kernels.recurrent.state_layout import StateLayout
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.tpu.copies import Copies
from pallas_kernels.recurrent.tpu.matrix_decode import MatrixDecode
from pallas_kernels.recurrent.tpu.matrix_sizes import sizes_of
from pallas_kernels.recurrent.tpu.slabs import SlabPlan

MIB = 2**20


@pytest.mark.parametrize(
    ("state", "key_heads", "dtype", "slab"),
    [
        ((32, 128, 128), 16, "float32", 8),  # Qwen3-Next
        ((32, 128, 256), 2, "float32", 4),  # Falcon-H1 34B
        ((40, 128, 128), 8, "bfloat16", 10),  # pairs of whole key heads of five
    ],
)
def test_buffers_take_half_of_what_a_v5e_gives_a_kernel(state, key_heads, dtype, slab):
    """16 MiB. Rather a slab of few blocks than none that compiles."""
    layout = StateLayout(shapes=(state,), dtypes=(dtype,), page_rows=128)
    place = StatePlace(layout=layout, part=0, layer_slot=0, layer_slots=1)
    decode = MatrixDecode.of(sizes_of(place, key_heads), packed=dtype == "bfloat16")
    assert decode.slab == slab
    inward, outward, *_ = Copies.scratch(SlabPlan.of(place, decode.num_slabs))
    rows = slab * state[2] // (2 if dtype == "bfloat16" else 1)
    assert inward.shape == outward.shape == (8, rows, 128)
    assert 2 * 8 * rows * 128 * 4 <= 8 * MIB
