"""Kernels that write a step's K and V and attend, run by the interpreter: races and reads out of bounds fail.

Every word of the pool is compared with a pool written by hand; all that no token wrote is NaN.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu import decode_plan, parts, prefill_plan
from pallas_kernels.tpu.attention import write_and_attend_tpu
from pallas_kernels.tpu.tuning import Sizes
from tests.pallas_kernels.cases import Step, attention_by_hand, make_step, written_by_hand
from tests.pallas_kernels.quantised_cases import check_pool, make_quantised_step

INTERPRET = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")
AROUND_A_PAGE = {"seq_lens": [1, 7, 8, 9, 17, 16], "query_lens": [1] * 6, "block_size": 8}
BF16 = {"dtype": "bfloat16", "activation_dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    """Two runs a step, four sequences a grid step: short sequences cross all of them."""
    for rule in ("RULE", "LATENT_RULE"):
        monkeypatch.setattr(decode_plan, rule, Sizes(tokens=16, most=2))
    monkeypatch.setattr(decode_plan, "SEQUENCES", 4)
    monkeypatch.setattr(prefill_plan, "rule_of", lambda loader: Sizes(tokens=16, most=16))


def check(step: Step, written: np.ndarray, **rest) -> None:
    """Pool and outputs, against the definition."""
    settings = AttentionSettings(
        layout=step.layout,
        layer_slot=step.layer_slot,
        layer_slots=step.layer_slots,
        scale=0.3,
        sliding_window=rest.get("window"),
        attention_chunk_size=rest.get("chunk"),
    )
    v = None if step.layout.latent else step.v
    result = write_and_attend_tpu(
        step.q, step.k, v, step.pages, step.batch, step.table, settings, interpret=INTERPRET
    )
    check_pool(step.layout, result.pages, written)
    tolerance = 2e-5 if step.layout.dtype == "float32" else 2e-2
    expected = attention_by_hand(step, scale=0.3, **rest)
    np.testing.assert_allclose(np.asarray(result.out, np.float32), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("shape", "rest"),
    [
        ({"head_size": 128, "heads": 2, "spare_rows": 1, **AROUND_A_PAGE}, {}),
        ({"head_size": 256, **AROUND_A_PAGE, **BF16}, {"chunk": 12}),
        ({"head_size": 64, "heads": 2, **AROUND_A_PAGE, **BF16, "block_size": 16}, {"window": 9}),
        (
            {
                "head_size": 192,
                "head_size_v": 128,
                "seq_lens": [5, 16],
                "query_lens": [1, 1],
                "block_size": 16,
            },
            {},
        ),
        (
            {
                "head_size": 576,
                "head_size_v": 512,
                "latent": True,
                "seq_lens": [35, 38],
                "query_lens": [1, 1],
                "block_size": 32,
                **BF16,
            },
            {},
        ),
    ],
    ids=["128", "256", "64", "192-128", "latents"],
)
def test_decodes(shape, rest):
    """Rows of a head in each dtype and size, whole ones and ones that tokens share."""
    step = make_step(group=2, **shape, **rest)
    check(step, written_by_hand(step), **rest)


@pytest.mark.parametrize(("block_size", "heads"), [(16, 1), (128, 2)])
def test_decodes_over_pages_of_8_bits(block_size, heads):
    """The scales of a page are a quarter of a row, and four rows."""
    case = make_quantised_step(
        dtype="int8",
        activation_dtype="bfloat16",
        seq_lens=[128, 130],
        query_lens=[1, 1],
        block_size=block_size,
        heads=heads,
        head_size=128,
        group=2,
        window=130,
    )
    check(case.step, case.written, window=130)


def test_a_mixed_step_in_parts(monkeypatch):
    """Two kernels after each other, twice, on one pool; padding tokens and rows."""
    step = make_step(
        seq_lens=[9, 25, 13],
        query_lens=[1, 1, 6],
        block_size=8,
        head_size=128,
        group=2,
        window=9,
        spare_tokens=2,
        spare_rows=1,
    )
    monkeypatch.setattr(parts, "TABLE_BYTES", 8 * step.table.block_ids.shape[1])
    check(step, written_by_hand(step), window=9)


def test_pages_that_sequences_share_are_not_written():
    step = make_step(seq_lens=[20, 18], query_lens=[1, 1], block_size=8, head_size=128, group=2)
    ids = np.array(step.table.block_ids)
    ids[1, :2] = ids[0, :2]
    (k, v), (other_k, other_v) = step.history
    shared = [(k, v), tuple(np.concatenate([x[:16], y[16:]]) for x, y in ((k, other_k), (v, other_v)))]
    step = replace(step, table=replace(step.table, block_ids=jnp.asarray(ids)), history=shared)
    check(step, written_by_hand(step))


def test_a_sequence_after_the_decodes_reads_what_another_one_writes():
    """The second sequence's first page is the first one's, of this very step."""
    step = make_step(seq_lens=[14, 9], query_lens=[12, 1], block_size=8, head_size=128, group=2)
    ids = np.array(step.table.block_ids)
    ids[1, 0] = ids[0, 0]
    (k, v), (other_k, other_v) = step.history
    follower = tuple(np.concatenate([x[:8], y[8:]]) for x, y in ((k, other_k), (v, other_v)))
    step = replace(step, table=replace(step.table, block_ids=jnp.asarray(ids)), history=[(k, v), follower])
    check(step, written_by_hand(step))
