"""The TPU kernels over pages of 8-bit numbers, run by the interpreter: races and reads out of bounds fail."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu import decode_plan, prefill_math, prefill_plan, quantised
from pallas_kernels.tpu.attention import paged_attention_tpu
from pallas_kernels.tpu.tuning import Sizes
from pallas_kernels.tpu.write import write_kv_tpu
from tests.pallas_kernels.cases import attention_by_hand
from tests.pallas_kernels.quantised_cases import QuantisedStep, check_pool, make_quantised_step

INTERPRET = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    """Two pages a run or chunk, two runs a step, a few queries a tile: short sequences cross all of them."""
    monkeypatch.setattr(decode_plan, "RULE", Sizes(tokens=256, most=8))
    monkeypatch.setattr(decode_plan, "STEP_TOKENS", 512)
    monkeypatch.setattr(decode_plan, "SEQUENCES", 4)
    monkeypatch.setattr(prefill_plan, "rule_of", lambda loader: Sizes(tokens=256, most=16))


def check(case: QuantisedStep, **rest) -> None:
    """Attention over the step's pages, other words NaN, with sinks, against the definition."""
    step = case.step
    sinks = np.linspace(-4, 4, step.q.shape[1], dtype=np.float32)
    settings = AttentionSettings(
        layout=step.layout,
        layer_slot=step.layer_slot,
        layer_slots=step.layer_slots,
        scale=0.3,
        sliding_window=rest.get("window"),
        attention_chunk_size=rest.get("chunk"),
        softcap=rest.get("softcap"),
        sinks=jnp.asarray(sinks),
    )
    attend = jax.jit(partial(paged_attention_tpu, settings=settings, interpret=INTERPRET))
    out = attend(step.q, jnp.asarray(case.written), step.batch, step.table)
    tolerance = {"float32": 2e-5, "bfloat16": 2e-2}[str(step.q.dtype)]
    expected = attention_by_hand(step, scale=0.3, sinks=sinks, **rest)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "activation", "shape", "rest"),
    [
        ("float8_e4m3fn", "bfloat16", {"heads": 2, "head_size": 128, "group": 2}, {"window": 130}),
        ("int8", "bfloat16", {"heads": 1, "head_size": 256, "group": 4}, {"chunk": 160, "softcap": 5.0}),
        ("int8", "float32", {"heads": 1, "head_size": 64, "group": 1}, {}),
        ("int8", "bfloat16", {"heads": 3, "head_size": 128, "group": 2, "block_size": 16}, {"window": 130}),
        ("float8_e4m3fn", "bfloat16", {"heads": 5, "head_size": 64, "group": 1, "block_size": 32}, {}),
    ],
)
def test_mixed_steps(dtype, activation, shape, rest):
    case = make_quantised_step(
        dtype=dtype,
        activation_dtype=activation,
        seq_lens=[128, 260, 130],
        query_lens=[1, 1, 4],
        spare_tokens=2,
        spare_rows=1,
        **({"block_size": 128} | shape),
        **{name: rest[name] for name in ("window", "chunk") if name in rest},
    )
    check(case, **rest)


@pytest.mark.parametrize(
    ("head_size", "heads"),
    [(128, 2), (64, 1)],
)
def test_float8_as_v5_and_v6_multiply_it(monkeypatch, head_size, heads):
    """Numbers 16 times smaller, NaN for -0, which pages do not have. Prefill in blocks of 32 and 16 rows."""
    monkeypatch.setattr(quantised, "float8_of_matrix_unit", lambda: jnp.dtype(jnp.float8_e4m3b11fnuz))
    monkeypatch.setattr(prefill_math, "BLOCK_ROWS", 32 * head_size // 128)
    monkeypatch.setattr(prefill_plan, "rule_of", lambda loader: Sizes(tokens=256, most=48))
    case = make_quantised_step(
        dtype="float8_e4m3fn",
        activation_dtype="bfloat16",
        seq_lens=[130, 260],
        query_lens=[1, 15],
        block_size=128,
        heads=heads,
        head_size=head_size,
        group=3,
    )
    check(case)


@pytest.mark.parametrize(
    ("dtype", "heads", "head_size", "block_size"),
    [
        ("int8", 2, 128, 128),
        ("float8_e4m3fn", 1, 256, 256),
        ("int8", 3, 64, 16),
        ("float8_e4m3fn", 5, 128, 32),
        ("int8", 1, 256, 64),
    ],
)
def test_written_pages_equal_the_definition_word_for_word(dtype, heads, head_size, block_size):
    """Runs that start inside a page, fill one and end inside one; every other token keeps its NaN."""
    case = make_quantised_step(
        dtype=dtype,
        seq_lens=[1, 300, 130],
        query_lens=[1, 180, 1],
        block_size=block_size,
        heads=heads,
        head_size=head_size,
        spare_tokens=3,
        spare_rows=1,
    )
    step = case.step
    settings = AttentionSettings(layout=step.layout, layer_slot=step.layer_slot, layer_slots=step.layer_slots)
    write = jax.jit(partial(write_kv_tpu, settings=settings, interpret=INTERPRET))
    pages = write(step.pages, step.k, step.v, step.batch, step.table)
    check_pool(step.layout, pages, case.written)
