"""Choosing an implementation, refusing bad shapes, and compiling once."""

import logging
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention, write_kv, write_latent
from pallas_kernels.cpu import available
from pallas_kernels.operations import IMPLEMENTATIONS, choose_implementation
from pallas_kernels.settings import AttentionSettings
from tests.pallas_kernels.cases import make_step


def arguments(step):
    return {"layout": step.layout, "layer_slot": step.layer_slot, "layer_slots": step.layer_slots}


def choose(step, name=None, **rest):
    return choose_implementation(AttentionSettings(**arguments(step), **rest), step.table, name)


def test_an_unknown_implementation_is_refused_with_the_known_names():
    step = make_step(seq_lens=[3], query_lens=[1])
    with pytest.raises(
        ValueError, match="unknown implementation 'cuda', known: reference, xla, numba, pallas_tpu"
    ):
        choose(step, "cuda")


def test_a_cpu_takes_numba_where_it_is_installed(monkeypatch, caplog):
    step = make_step(seq_lens=[3], query_lens=[1], head_size=16)
    assert choose(step) is IMPLEMENTATIONS["numba"]
    monkeypatch.setattr(available, "why_not", lambda: "numba is not installed")
    monkeypatch.setattr("pallas_kernels.choice._already_said", set())
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert choose(step) is IMPLEMENTATIONS["xla"]
    assert caplog.messages == ["numba is not used (numba is not installed): using xla"]
    assert caplog.records[0].levelno == logging.INFO


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_size": 20}, "head sizes 20 and 20 of K and V are not multiples of 8"),
        ({"head_size": 96}, "block_size 8 is not a multiple of 32"),
        ({"head_size": 192, "head_size_v": 64, "dtype": "bfloat16"}, "64 words of two elements a token"),
        ({"head_size": 448, "head_size_v": 256, "dtype": "bfloat16"}, "two halves of 96 elements"),
        ({"head_size": 64}, "block_size 8 is not a multiple of 16"),
        ({"block_size": 4}, "block_size 4 is not a multiple of 8"),
        ({"spare_width": 200_000}, "above 524288"),
        ({"dtype": "int8"}, r"block_size 8 in 8 bits is none of \(16, 32, 64\) or whole rows of 128"),
        ({"dtype": "float8_e4m3fn", "head_size": 80}, "heads of 80 in 8 bits are neither 64, 128 nor"),
    ],
)
def test_a_shape_that_pallas_does_not_serve(change, reason, monkeypatch, caplog):
    step = make_step(**({"seq_lens": [3], "query_lens": [1], "head_size": 128, "block_size": 8} | change))
    with pytest.raises(ValueError, match=reason):
        choose(step, "pallas_tpu")

    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr("pallas_kernels.choice._already_said", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert choose(step) is IMPLEMENTATIONS["xla"]
    assert len(caplog.messages) == 1
    assert re.search(reason, caplog.messages[0])


def test_a_tpu_takes_pallas_where_it_serves(monkeypatch):
    step = make_step(seq_lens=[3], query_lens=[1], head_size=128, block_size=8)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert choose(step) is IMPLEMENTATIONS["pallas_tpu"]


def test_shapes_that_disagree_are_refused():
    step = make_step(seq_lens=[3], query_lens=[1], heads=2, group=2)
    with pytest.raises(ValueError, match=r"q must be \[1, multiple of 2, 8\], got \[1, 3, 8\]"):
        paged_attention(step.q[:, :3], step.pages, step.batch, step.table, scale=1.0, **arguments(step))
    twice = jnp.concatenate([step.q, step.q])
    with pytest.raises(ValueError, match=r"q must be \[1, multiple of 2, 8\], got \[2, 4, 8\]"):
        paged_attention(twice, step.pages, step.batch, step.table, scale=1.0, **arguments(step))
    with pytest.raises(ValueError, match=r"k and v must be \[1, 2, 8\], got \[1, 1, 8\]"):
        write_kv(step.pages, step.k[:, :1], step.v, step.batch, step.table, **arguments(step))
    latent = make_step(seq_lens=[3], query_lens=[1], latent=True)
    with pytest.raises(ValueError, match="use write_latent"):
        write_kv(latent.pages, latent.k, latent.k, latent.batch, latent.table, **arguments(latent))
    with pytest.raises(ValueError, match="keeps no latents: give V as well, or use write_kv"):
        write_latent(step.pages, step.k, step.batch, step.table, **arguments(step))
    with pytest.raises(ValueError, match=r"latents must be \[1, 1, 8\], got \[1, 1, 4\]"):
        write_latent(latent.pages, latent.k[..., :4], latent.batch, latent.table, **arguments(latent))
    other = make_step(seq_lens=[3], query_lens=[1], head_size_v=4)
    with pytest.raises(ValueError, match=r"k and v must be \[1, 1, 8\] and \[1, 1, 4\], got"):
        write_kv(other.pages, other.k, other.k, other.batch, other.table, **arguments(other))
    with pytest.raises(ValueError, match=r"pages must be uint32\[num_pages, 8, 128\], got float32"):
        write_kv(step.pages.astype(np.float32), step.k, step.v, step.batch, step.table, **arguments(step))


@pytest.mark.parametrize("rows", [0, 1])
def test_a_step_of_no_tokens_is_refused(rows):
    step = make_step(seq_lens=[3] * rows, query_lens=[0] * rows)
    message = f"at least one token and one row, padding included; this one has 0 and {rows}"
    with pytest.raises(ValueError, match=message):
        paged_attention(step.q, step.pages, step.batch, step.table, scale=1.0, **arguments(step))
    with pytest.raises(ValueError, match=message):
        write_kv(step.pages, step.k, step.v, step.batch, step.table, **arguments(step))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_slot": 3}, r"layer_slot must be in \[0, 3\), got 3"),
        ({"layer_slots": 0}, "layer_slots must be at least 1, got 0"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"attention_chunk_size": -4}, "attention_chunk_size must be at least 1, got -4"),
        (
            {"attention_chunk_size": 4, "sliding_window": 8},
            "not both: sliding_window=8, attention_chunk_size=4",
        ),
        ({"sinks": np.zeros(3)}, r"sinks must be \[4\], got \[3\]"),
        ({"softcap": -1.0}, "softcap must be above 0, got -1.0"),
    ],
)
def test_settings_out_of_range_are_refused(change, message):
    step = make_step(seq_lens=[3], query_lens=[1])
    with pytest.raises(ValueError, match=message):
        paged_attention(
            step.q, step.pages, step.batch, step.table, **({"scale": 1.0} | arguments(step) | change)
        )


def test_lengths_and_counts_do_not_compile_again():
    """Shapes of arrays are the only key: the same buckets serve any lengths, decodes and chunks."""
    first = make_step(seq_lens=[40, 8, 9], query_lens=[1, 1, 6], spare_width=3)
    second = make_step(seq_lens=[2, 17], query_lens=[1, 5], spare_rows=1, spare_tokens=2)
    width = first.table.block_ids.shape[1]
    wider = np.zeros((3, width), np.int32)
    wider[:, : second.table.block_ids.shape[1]] = second.table.block_ids
    pool = np.zeros_like(first.pages)
    pool[: len(second.pages)] = second.pages
    second = replace(
        second, pages=jax.numpy.asarray(pool), table=replace(second.table, block_ids=jax.numpy.asarray(wider))
    )
    compilations = 0

    @jax.jit
    def attend(q, pages, batch, table):
        nonlocal compilations
        compilations += 1
        return paged_attention(q, pages, batch, table, scale=1.0, sliding_window=9, **arguments(first))

    for step in (first, second):
        attend(step.q, step.pages, step.batch, step.table).block_until_ready()
    assert compilations == 1
