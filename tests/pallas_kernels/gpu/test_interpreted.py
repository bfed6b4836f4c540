"""The GPU kernels run by the interpreter, which simulates copies and barriers and finds races."""

from dataclasses import replace
from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import attention, plan
from pallas_kernels.gpu.attention import paged_attention_gpu
from pallas_kernels.gpu.numbers import numbers_of_words
from pallas_kernels.gpu.write import write_kv_gpu
from pallas_kernels.settings import AttentionSettings
from tests.pallas_kernels.cases import Step, attention_by_hand, make_step, written_by_hand
from tests.pallas_kernels.quantised_cases import make_quantised_step

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Chunks of 32 tokens and tiles of 16 rows, so that short sequences cross both."""
    monkeypatch.setattr(plan, "BUFFERS", ((32, 2),))
    monkeypatch.setattr(plan, "MOST_ROWS", 16)
    monkeypatch.setattr(plan, "FEW_ROWS", 16)


def settings_of(step: Step, **rest) -> AttentionSettings:
    return AttentionSettings(
        layout=step.layout, layer_slot=step.layer_slot, layer_slots=step.layer_slots, scale=0.3, **rest
    )


def written(step: Step) -> np.ndarray:
    """The pool after the kernel's write."""
    v = None if step.layout.latent else step.v
    write = partial(write_kv_gpu, settings=settings_of(step), interpret=INTERPRET)
    return np.asarray(jax.jit(write)(step.pages, step.k, v, step.batch, step.table))


def check(step: Step, pages: np.ndarray | None = None, **rest) -> None:
    """Attends over written pages (None: by hand), every other word of the pool being NaN."""
    pool = jax.numpy.asarray(written_by_hand(step) if pages is None else pages)
    attend = jax.jit(partial(paged_attention_gpu, settings=settings_of(step, **rest), interpret=INTERPRET))
    out = attend(step.q, pool, step.batch, step.table)
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


HALF = {"activation_dtype": "bfloat16", "block_size": 64}


@pytest.mark.parametrize(
    ("case", "rest", "on_hopper"),
    [
        ({"head_size": 80, "group": 3, "heads": 2}, {"sliding_window": 40}, False),
        ({"head_size": 80, "group": 3}, {}, True),
        ({"head_size": 192, "head_size_v": 128, "group": 2}, {}, False),
        ({"head_size": 64, "head_size_v": 32, "group": 2}, {"softcap": 5.0}, True),
        ({"head_size": 32, "head_size_v": 96, "group": 4}, {}, False),
        ({"head_size": 96, "head_size_v": 64, "latent": True, "group": 32}, {}, False),
    ],
    ids=["80", "80 wgmma", "192 and 128", "64 and 32 wgmma", "32 and 96", "latents of many query heads"],
)
def test_written_and_attended_over_other_sizes(monkeypatch, case, rest, on_hopper):
    """A decode and a chunk, from what the kernel wrote; latents' query heads are shared among two tiles."""
    if on_hopper:
        monkeypatch.setattr(attention, "compute_capability", lambda: 9.0)
    step = make_step(
        seq_lens=[1, 70],
        query_lens=[1, 9],
        window=rest.get("sliding_window"),
        dtype="bfloat16",
        spare_rows=1,
        spare_tokens=1,
        **HALF,
        **case,
    )
    pages = written(step)
    np.testing.assert_array_equal(pages, written_by_hand(step))
    check(step, pages, **rest)


@pytest.mark.parametrize(
    ("dtype", "case", "rest", "on_hopper"),
    [
        ("int8", {"head_size": 64, "heads": 2, "group": 3}, {"sliding_window": 40}, False),
        ("float8_e4m3fn", {"head_size": 128, "group": 4}, {}, False),
        ("int8", {"head_size": 64, "group": 5}, {"sliding_window": 40}, True),
    ],
    ids=["int8", "fp8", "int8 wgmma"],
)
def test_written_and_attended_over_8_bits(monkeypatch, dtype, case, rest, on_hopper):
    """The numbers and scales of a decode and a chunk, then attention over them."""
    if on_hopper:
        monkeypatch.setattr(attention, "compute_capability", lambda: 9.0)
    window = rest.get("sliding_window")
    made = make_quantised_step(
        dtype=dtype, seq_lens=[1, 70], query_lens=[1, 9], window=window, spare_rows=1, **HALF, **case
    )
    pages = written(made.step)
    np.testing.assert_array_equal(pages, made.written)
    check(made.step, pages, **rest)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_every_number_of_8_bits_is_taken_from_words_as_it_is(dtype):
    """All 256 bytes, in every place of a word; NaN of float8 is not asked for: its scale is NaN."""
    octets = np.arange(256, dtype=np.uint8)
    words = np.stack([octets, octets[::-1], octets ^ 0x55, octets ^ 0xAA], axis=1)
    kind = np.int8 if dtype == "int8" else ml_dtypes.float8_e4m3fn
    for byte in range(2):
        halves = numbers_of_words(jax.numpy.asarray(words.view(np.uint32)[:, 0]), dtype, byte)
        for half, numbers in enumerate(halves):
            expected = words[:, 2 * half + byte].view(kind).astype(np.float32)
            got = np.where(np.isnan(expected), np.nan, np.asarray(numbers, np.float32))
            # XLA's CPU may take numbers below 2**-126 for 0: those below 2**-6 here.
            small = np.abs(expected) < 2.0**-6
            np.testing.assert_array_equal(got[~small], expected[~small])


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
    np.testing.assert_array_equal(written(step), written_by_hand(step))
