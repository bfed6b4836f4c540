"""Holding a write and an attention over it against their definitions."""

import jax
import numpy as np

from pallas_kernels import paged_attention, write_kv, write_latent
from tests.pallas_kernels.cases import Step, attention_by_hand

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def check(
    step: Step,
    written: np.ndarray,
    implementation: str,
    *,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> None:
    """Writes, then attends (layer slot traced): the pool must be `written`, the results attention by hand."""

    @jax.jit
    def write_then_attend(q, k, v, pages, batch, table, layer_slot):
        place = {"layout": step.layout, "layer_slot": layer_slot, "layer_slots": step.layer_slots}
        if step.layout.latent:
            pages = write_latent(pages, k, batch, table, implementation=implementation, **place)
        else:
            pages = write_kv(pages, k, v, batch, table, implementation=implementation, **place)
        rest = {
            "scale": 0.3,
            "sliding_window": window,
            "attention_chunk_size": chunk,
            "softcap": softcap,
            "sinks": None if sinks is None else jax.numpy.asarray(sinks),
        }
        return pages, paged_attention(q, pages, batch, table, implementation=implementation, **place, **rest)

    pages, out = write_then_attend(
        step.q, step.k, step.v, step.pages, step.batch, step.table, step.layer_slot
    )
    np.testing.assert_array_equal(pages, written)
    assert out.dtype == step.q.dtype
    tolerance = TOLERANCE[str(step.q.dtype)]
    expected = attention_by_hand(step, scale=0.3, window=window, chunk=chunk, softcap=softcap, sinks=sinks)
    real = sum(step.query_lens)
    np.testing.assert_allclose(
        np.asarray(out[:real], np.float32), expected[:real], atol=tolerance, rtol=tolerance
    )
    assert (np.asarray(out[real:], np.float32) == 0).all()
