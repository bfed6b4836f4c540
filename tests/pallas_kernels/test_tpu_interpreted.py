"""The TPU kernels run by the interpreter, which simulates DMAs and finds races and reads out of bounds."""

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu import decode_plan, page_writer, parts, prefill_math, prefill_plan
from pallas_kernels.tpu.attention import paged_attention_tpu
from pallas_kernels.tpu.tuning import Sizes
from pallas_kernels.tpu.write import write_kv_tpu
from tests.pallas_kernels.cases import Step, attention_by_hand, make_step, written_by_hand

INTERPRET = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    """Two pages a run or chunk, two runs a step, a few queries a tile: tiny sequences cross all of them."""
    for rule in ("RULE", "LATENT_RULE"):
        monkeypatch.setattr(decode_plan, rule, Sizes(tokens=16, most=8))
    monkeypatch.setattr(decode_plan, "STEP_TOKENS", 32)
    monkeypatch.setattr(decode_plan, "SEQUENCES", 4)
    monkeypatch.setattr(prefill_plan, "rule_of", lambda loader: Sizes(tokens=16, most=16))
    monkeypatch.setattr(page_writer, "MIXED_BYTES", 1)


def settings_of(step: Step, **rest) -> AttentionSettings:
    return AttentionSettings(
        layout=step.layout, layer_slot=step.layer_slot, layer_slots=step.layer_slots, scale=0.3, **rest
    )


def check(step: Step, **rest) -> None:
    """Attention over the step's pages, other words NaN, against the definition."""
    pages = jax.numpy.asarray(written_by_hand(step))
    sinks = rest.pop("sinks", None)
    settings = settings_of(
        step,
        sliding_window=rest.get("window"),
        attention_chunk_size=rest.get("chunk"),
        softcap=rest.get("softcap"),
        sinks=None if sinks is None else jax.numpy.asarray(sinks),
    )
    out = paged_attention_tpu(step.q, pages, step.batch, step.table, settings, interpret=INTERPRET)
    tolerance = {"float32": 2e-5, "bfloat16": 2e-2}[step.layout.dtype]
    expected = attention_by_hand(step, scale=0.3, sinks=sinks, **rest)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("case", "rest"),
    [
        ({"heads": 1, "head_size": 256, "dtype": "float32", "group": 4}, {}),
        ({"heads": 1, "head_size": 256, "dtype": "bfloat16", "group": 4}, {"window": 9}),
        ({"heads": 2, "head_size": 128, "dtype": "bfloat16", "group": 1}, {"window": 8, "softcap": 5.0}),
        ({"heads": 1, "head_size": 128, "dtype": "bfloat16", "group": 16}, {"window": 1}),
        ({"heads": 2, "head_size": 128, "dtype": "float32", "group": 3}, {"window": 40}),
        ({"heads": 4, "head_size": 128, "dtype": "bfloat16", "group": 2}, {"chunk": 12}),
        ({"heads": 1, "head_size": 128, "dtype": "float32", "group": 2}, {"chunk": 8}),
    ],
)
def test_mixed_steps(case, rest):
    step = make_step(
        seq_lens=[8, 25, 13],
        query_lens=[1, 1, 6],
        block_size=8,
        activation_dtype=case["dtype"],
        spare_tokens=2,
        spare_rows=1,
        **case,
        **{name: rest[name] for name in ("window", "chunk") if name in rest},
    )
    check(step, **rest)


@pytest.mark.parametrize("softcap", [0.3, 0.5])
def test_a_place_of_which_a_query_sees_nothing(softcap):
    """Masked scores are multiplied, too: fused with the subtraction of the largest, that gave 2**inf."""
    step = make_step(
        seq_lens=[3], query_lens=[3], block_size=4, heads=1, head_size=64, group=1, dtype="float32"
    )
    check(step, softcap=softcap)


@pytest.mark.parametrize(("dtype", "group", "window"), [("bfloat16", 4, None), ("float32", 3, 16)])
def test_heads_of_64_with_sinks(dtype, group, window):
    step = make_step(
        seq_lens=[1, 33, 18],
        query_lens=[1, 1, 5],
        block_size=16,
        heads=2,
        head_size=64,
        group=group,
        dtype=dtype,
        activation_dtype=dtype,
        window=window,
    )
    check(step, window=window, sinks=np.linspace(-4, 4, 2 * group, dtype=np.float32))


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ({"head_size": 80, "block_size": 64}, "bfloat16"),
        ({"head_size": 96, "block_size": 32}, "bfloat16"),
        ({"head_size": 96, "block_size": 32}, "float32"),
        ({"head_size": 192, "block_size": 16}, "bfloat16"),
        ({"head_size": 192, "head_size_v": 128, "block_size": 32}, "bfloat16"),
        ({"head_size": 192, "head_size_v": 128, "block_size": 16}, "float32"),
        ({"head_size": 128, "head_size_v": 192, "block_size": 32}, "bfloat16"),
        ({"head_size": 576, "head_size_v": 512, "block_size": 32, "latent": True}, "bfloat16"),
        ({"head_size": 192, "head_size_v": 128, "block_size": 16, "latent": True}, "float32"),
    ],
    ids=lambda case: case if isinstance(case, str) else "-".join(str(x) for x in case.values()),
)
def test_heads_that_share_rows_and_values_of_another_size(sizes, dtype):
    """Tables start inside a window; queries begin and end inside the rows that tokens share."""
    size = sizes["block_size"]
    step = make_step(
        seq_lens=[1, size + 3, 2 * size, size + 6],
        query_lens=[1, 1, 1, 9],
        heads=1 if sizes.get("latent") else 2,
        group=3,
        dtype=dtype,
        activation_dtype=dtype,
        window=size,
        spare_rows=1,
        **sizes,
    )
    check(step, window=size)


def test_decodes_of_every_length_around_a_page():
    """More sequences than one grid step takes, the last step not full."""
    step = make_step(seq_lens=[1, 7, 8, 9, 17, 16], query_lens=[1] * 6, block_size=8, head_size=128, group=2)
    check(step)


@pytest.mark.parametrize("chunk", [None, 160])
def test_prefill_in_chunks_of_whole_tiles(monkeypatch, chunk):
    monkeypatch.setattr(prefill_plan, "rule_of", lambda loader: Sizes(tokens=128, most=16))
    step = make_step(
        seq_lens=[170],
        query_lens=[15],
        block_size=64,
        head_size=128,
        group=2,
        dtype="bfloat16",
        activation_dtype="bfloat16",
        chunk=chunk,
    )
    check(step, chunk=chunk)


@pytest.mark.parametrize("matrix", [128, 256])
@pytest.mark.parametrize(
    ("head_size", "dtype", "rest"),
    [
        (128, "bfloat16", {}),
        (128, "bfloat16", {"softcap": 5.0, "sinks": np.linspace(-4, 4, 6, dtype=np.float32)}),
        (64, "bfloat16", {"sinks": np.linspace(-4, 4, 6, dtype=np.float32)}),
        (128, "float32", {"window": 20}),
    ],
)
def test_prefill_in_blocks_of_rows(monkeypatch, matrix, head_size, dtype, rest):
    """15 queries x 3 heads are 48 rows a place, in blocks of 32 and 16, whatever the matrix unit adds up."""
    monkeypatch.setattr(prefill_math, "matrix_width", lambda: matrix)
    units = 32 * head_size // 128
    monkeypatch.setattr(prefill_math, "BLOCK_ROWS", 32 * units // matrix)
    monkeypatch.setattr(prefill_plan, "rule_of", lambda loader: Sizes(tokens=32, most=48))
    step = make_step(
        seq_lens=[52],
        query_lens=[15],
        block_size=16,
        heads=2,
        head_size=head_size,
        group=3,
        dtype=dtype,
        activation_dtype=dtype,
        **{name: rest[name] for name in ("window",) if name in rest},
    )
    check(step, **rest)


def test_a_table_too_large_for_smem_is_served_in_parts(monkeypatch):
    step = make_step(
        seq_lens=[9, 4, 12], query_lens=[1, 1, 7], block_size=8, head_size=128, group=2, spare_tokens=1
    )
    monkeypatch.setattr(parts, "TABLE_BYTES", 4 * step.table.block_ids.shape[1])
    check(step)


@pytest.mark.parametrize(("seq_lens", "query_lens"), [([5], [5]), ([9, 30], [1, 1]), ([16], [16])], ids=str)
def test_steps_of_one_kind_only(seq_lens, query_lens):
    step = make_step(seq_lens=seq_lens, query_lens=query_lens, block_size=8, head_size=128, group=2)
    check(step)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 1, "head_size": 256},
        {"heads": 2, "head_size": 128},
        {"heads": 2, "head_size": 64},
        {"heads": 2, "head_size": 96},
        {"heads": 1, "head_size": 256, "head_size_v": 192},
        {"heads": 1, "head_size": 576, "head_size_v": 512, "latent": True},
    ],
    ids=lambda sizes: "-".join(str(x) for x in sizes.values()),
)
def test_written_pages_equal_the_definition_word_for_word(dtype, sizes):
    """Runs that start inside a page, fill whole pages and end inside one; every other word keeps its NaN."""
    step = make_step(
        seq_lens=[1, 9, 30, 8],
        query_lens=[1, 1, 25, 8],
        block_size=8,
        dtype=dtype,
        spare_tokens=3,
        spare_rows=1,
        **sizes,
    )
    v = None if step.layout.latent else step.v
    pages = write_kv_tpu(
        step.pages, step.k, v, step.batch, step.table, settings_of(step), interpret=INTERPRET
    )
    np.testing.assert_array_equal(pages, written_by_hand(step))
