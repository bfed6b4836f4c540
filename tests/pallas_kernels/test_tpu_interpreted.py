"""The TPU kernels run by the interpreter, which simulates DMAs and finds races and reads out of bounds."""

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu import attention
from pallas_kernels.tpu.attention import paged_attention_tpu
from pallas_kernels.tpu.write import write_kv_tpu
from tests.pallas_kernels.cases import Step, attention_by_hand, make_step, written_by_hand

INTERPRET = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Two blocks a chunk and a few queries a tile, so that tiny sequences cross both."""
    monkeypatch.setattr(attention, "DECODE_CHUNK", 16)
    monkeypatch.setattr(attention, "PREFILL_CHUNK", 16)
    monkeypatch.setattr(attention, "PREFILL_ROWS", 16)


def settings_of(step: Step, **rest) -> AttentionSettings:
    return AttentionSettings(
        layout=step.layout, layer_slot=step.layer_slot, layer_slots=step.layer_slots, scale=0.3, **rest
    )


@pytest.mark.parametrize(
    ("case", "window", "softcap"),
    [
        ({"heads": 1, "head_size": 256, "dtype": "float32", "group": 4}, None, None),
        ({"heads": 1, "head_size": 256, "dtype": "bfloat16", "group": 4}, 9, None),
        ({"heads": 2, "head_size": 128, "dtype": "bfloat16", "group": 1}, 8, 5.0),
        ({"heads": 1, "head_size": 128, "dtype": "bfloat16", "group": 16}, 1, None),
        ({"heads": 2, "head_size": 128, "dtype": "float32", "group": 3}, 40, None),
    ],
)
def test_attention_equals_the_definition(case, window, softcap):
    step = make_step(
        seq_lens=[8, 37, 20],
        query_lens=[1, 1, 10],
        block_size=8,
        window=window,
        activation_dtype=case["dtype"],
        spare_tokens=2,
        spare_rows=1,
        **case,
    )
    pages = jax.numpy.asarray(written_by_hand(step))
    out = paged_attention_tpu(
        step.q,
        pages,
        step.batch,
        step.table,
        settings_of(step, sliding_window=window, softcap=softcap),
        interpret=INTERPRET,
    )
    tolerance = {"float32": 2e-5, "bfloat16": 2e-2}[case["dtype"]]
    expected = attention_by_hand(step, scale=0.3, window=window, softcap=softcap)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("seq_lens", "query_lens"), [([5], [5]), ([9, 30], [1, 1]), ([16], [16])], ids=str)
def test_steps_of_one_kind_only(seq_lens, query_lens):
    step = make_step(seq_lens=seq_lens, query_lens=query_lens, block_size=8, head_size=128, group=2)
    pages = jax.numpy.asarray(written_by_hand(step))
    out = paged_attention_tpu(step.q, pages, step.batch, step.table, settings_of(step), interpret=INTERPRET)
    np.testing.assert_allclose(out, attention_by_hand(step, scale=0.3), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "head_size"), [(1, 256), (2, 128)])
def test_written_pages_equal_the_definition_word_for_word(dtype, heads, head_size):
    """Runs that start inside a page, fill whole pages and end inside one; every other word keeps its NaN."""
    step = make_step(
        seq_lens=[1, 9, 30, 8],
        query_lens=[1, 1, 25, 8],
        block_size=8,
        heads=heads,
        head_size=head_size,
        dtype=dtype,
        spare_tokens=3,
        spare_rows=1,
    )
    pages = write_kv_tpu(
        step.pages, step.k, step.v, step.batch, step.table, settings_of(step), interpret=INTERPRET
    )
    np.testing.assert_array_equal(pages, written_by_hand(step))
