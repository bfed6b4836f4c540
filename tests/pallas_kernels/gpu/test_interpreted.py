"""The GPU kernels run by the interpreter, which simulates copies and barriers and finds races."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import attention, plan
from pallas_kernels.gpu.attention import paged_attention_gpu
from pallas_kernels.gpu.write import write_kv_gpu
from pallas_kernels.settings import AttentionSettings
from tests.pallas_kernels.cases import Step, attention_by_hand, make_step, written_by_hand

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Chunks of 32 tokens and tiles of 16 rows, so that short sequences cross both."""
    monkeypatch.setattr(plan, "BUFFERS", ((32, 2),))
    monkeypatch.setattr(plan, "PREFILL_ROWS", (16, 16))


def settings_of(step: Step, **rest) -> AttentionSettings:
    return AttentionSettings(
        layout=step.layout, layer_slot=step.layer_slot, layer_slots=step.layer_slots, scale=0.3, **rest
    )


def check(step: Step, **rest) -> None:
    """Attends over written pages, every other word of the pool being NaN."""
    pages = jax.numpy.asarray(written_by_hand(step))
    attend = jax.jit(partial(paged_attention_gpu, settings=settings_of(step, **rest), interpret=INTERPRET))
    out = attend(step.q, pages, step.batch, step.table)
    names = {"sliding_window": "window", "attention_chunk_size": "chunk"}
    rest = {names.get(name, name): value for name, value in rest.items()}
    expected = attention_by_hand(step, scale=0.3, **rest)
    tolerance = TOLERANCE[str(step.q.dtype)]
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("case", "rest"),
    [
        ({"heads": 2, "group": 3, "head_size": 64, "block_size": 16}, {"softcap": 5.0}),
        ({"heads": 1, "group": 16, "head_size": 32, "block_size": 64}, {"sliding_window": 33}),
    ],
    ids=["splits", "window"],
)
def test_decodes_equal_the_definition(case, rest):
    """Sequences of one token, of a page, of many chunks (shared among splits), and padding rows."""
    step = make_step(
        seq_lens=[1, 16, 197],
        query_lens=[1, 1, 1],
        window=rest.get("sliding_window"),
        dtype="bfloat16",
        activation_dtype="bfloat16",
        spare_rows=1,
        **case,
    )
    step = replace(step, batch=replace(step.batch, decode_only=True))
    check(step, **rest)


@pytest.mark.parametrize(
    ("case", "rest"),
    [
        ({"dtype": "float32", "head_size": 32, "block_size": 8, "group": 5}, {"attention_chunk_size": 24}),
        (
            {
                "dtype": "bfloat16",
                "head_size": 64,
                "block_size": 48,
                "group": 2,
                "activation_dtype": "bfloat16",
            },
            {"sliding_window": 40},
        ),
    ],
    ids=["float32 chunked sinks", "bfloat16 window"],
)
def test_mixed_steps_equal_the_definition(case, rest):
    """Decodes and prefill chunks that start and end inside tiles, windows and pages."""
    step = make_step(
        seq_lens=[37, 41],
        query_lens=[1, 5],
        window=rest.get("sliding_window"),
        chunk=rest.get("attention_chunk_size"),
        spare_tokens=2,
        **case,
    )
    sinks = jax.numpy.linspace(-1.0, 2.0, step.q.shape[1])
    check(step, sinks=sinks, **rest)


@pytest.mark.parametrize("rest", [{}, {"sliding_window": 40, "softcap": 5.0}], ids=["full", "window"])
def test_prefill_by_wgmma_equals_the_definition(monkeypatch, rest):
    """Tiles that are not full, chunks with and without a mask."""
    monkeypatch.setattr(attention, "compute_capability", lambda: 9.0)
    step = make_step(
        seq_lens=[105],
        query_lens=[20],
        window=rest.get("sliding_window"),
        dtype="bfloat16",
        activation_dtype="bfloat16",
        block_size=16,
        group=2,
        head_size=32,
    )
    check(step, sinks=jax.numpy.linspace(-1.0, 2.0, step.q.shape[1]), **rest)


@pytest.mark.parametrize(("dtype", "head_size"), [("float32", 32), ("bfloat16", 96)])
def test_written_pages_equal_the_definition_word_for_word(dtype, head_size):
    """Runs that start inside a page and end inside one; every other word keeps its NaN."""
    step = make_step(
        seq_lens=[1, 20],
        query_lens=[1, 12],
        block_size=8,
        heads=4,
        head_size=head_size,
        dtype=dtype,
        spare_tokens=2,
        spare_rows=1,
    )
    pages = write_kv_gpu(
        step.pages, step.k, step.v, step.batch, step.table, settings_of(step), interpret=INTERPRET
    )
    np.testing.assert_array_equal(pages, written_by_hand(step))
