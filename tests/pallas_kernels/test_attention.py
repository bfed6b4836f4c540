"""The reference and the XLA form against attention in numpy, over a pool whose other words are NaN."""

import numpy as np
import pytest

from tests.pallas_kernels import checking
from tests.pallas_kernels.cases import Step, make_step, written_by_hand

IMPLEMENTATIONS = ["reference", "xla"]


def check(step: Step, implementation: str, **rest) -> None:
    """Holds both results against the definitions."""
    checking.check(step, written_by_hand(step), implementation, **rest)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 1, 3, 4, 9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_steps_of_every_length_around_a_page(implementation, window, dtype):
    step = make_step(
        seq_lens=[1, 3, 4, 5, 40, 1, 3, 4, 5, 41],
        query_lens=[1, 1, 1, 1, 1, 1, 3, 4, 5, 17],
        window=window,
        dtype=dtype,
        spare_tokens=3,
        spare_rows=2,
    )
    check(step, implementation, window=window)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("chunk", [1, 3, 4, 16])
def test_chunks_smaller_and_larger_than_a_page(implementation, chunk):
    step = make_step(
        seq_lens=[1, 4, 16, 17, 40, 5, 41],
        query_lens=[1, 1, 1, 1, 1, 5, 17],
        chunk=chunk,
        spare_tokens=3,
        spare_rows=2,
    )
    check(step, implementation, chunk=chunk)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 3])
def test_sinks_take_part_in_the_softmax(implementation, window):
    step = make_step(seq_lens=[1, 9, 14], query_lens=[1, 1, 5], heads=2, group=3, window=window)
    sinks = np.array([-3.0, 0.0, 1.0, 2.5, 7.0, -40.0], np.float32)
    check(step, implementation, window=window, sinks=sinks)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (1, 16), (2, 3), (4, 2), (3, 1)])
@pytest.mark.parametrize("head_size", [8, 16, 128])
def test_grouped_and_multi_query_heads(implementation, heads, group, head_size):
    step = make_step(seq_lens=[9, 6, 14], query_lens=[1, 6, 5], heads=heads, group=group, head_size=head_size)
    check(step, implementation, softcap=2.0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"head_size": 80, "block_size": 8},
        {"head_size": 96},
        {"head_size": 192, "head_size_v": 128},
        {"head_size": 24, "head_size_v": 8},
        {"head_size": 24, "head_size_v": 128},
        {"head_size": 8, "head_size_v": 20},
        {"head_size": 64, "head_size_v": 32},
        {"head_size": 24, "head_size_v": 16, "latent": True, "heads": 1},
        {"head_size": 288, "head_size_v": 256, "latent": True, "heads": 1},
    ],
    ids=lambda sizes: "-".join(str(x) for x in sizes.values()),
)
def test_heads_that_fill_no_rows_and_values_of_another_size(implementation, dtype, sizes):
    step = make_step(
        seq_lens=[9, 6, 14], query_lens=[1, 6, 5], window=7, dtype=dtype, **({"heads": 2, "group": 3} | sizes)
    )
    check(step, implementation, window=7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_activations(implementation):
    step = make_step(
        seq_lens=[9, 30], query_lens=[1, 6], dtype="bfloat16", activation_dtype="bfloat16", window=5
    )
    check(step, implementation, window=5)


@pytest.mark.parametrize("window", [None, 512])
def test_xla_walks_many_chunks_and_tiles(window):
    """Longer than every chunk of the XLA form, with tiles and chunks that end at odd places."""
    step = make_step(
        seq_lens=[4500, 700, 2050, 333],
        query_lens=[1, 1, 300, 333],
        block_size=16,
        window=window,
        spare_tokens=7,
    )
    check(step, "xla", window=window)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_of_decodes_only_and_one_of_padding_only(implementation):
    check(make_step(seq_lens=[7, 12, 1], query_lens=[1, 1, 1], spare_rows=5, spare_tokens=5), implementation)
    check(make_step(seq_lens=[], query_lens=[], spare_rows=2, spare_tokens=4), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_first_and_the_last_layer_slot(implementation):
    for slot in (0, 2):
        check(make_step(seq_lens=[6, 9], query_lens=[1, 4], layer_slot=slot), implementation)
