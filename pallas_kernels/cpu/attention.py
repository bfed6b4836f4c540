"""Paged attention on a CPU: decodes by a kernel of numba's, prefill chunks in plain XLA."""

import jax
import jax.numpy as jnp

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.choice import Queries
from pallas_kernels.cpu import available
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.xla.attention import attend_prefills

_LANES = 16


def refuses_on_cpu(settings: AttentionSettings, table: GroupTable, q: Queries | None) -> str | None:
    """Why these kernels do not serve a layer, or None."""
    del table, q
    reason = available.why_not()
    layout = settings.layout
    if reason is not None:
        return reason
    if layout.is_quantised:
        return f"pages are {layout.dtype}, not bfloat16 or float32"
    if layout.head_size % _LANES or layout.value_size % _LANES:
        return f"heads of {layout.head_size} and {layout.value_size} are no multiples of {_LANES}"
    if layout.dtype == "bfloat16" and (layout.latent or layout.head_size != layout.value_size):
        return "bfloat16 pages hold latents, or K and V of different sizes"
    return None


def paged_attention_cpu(
    q: jax.Array, pages: jax.Array, batch: RaggedBatch, table: GroupTable, settings: AttentionSettings
) -> jax.Array:
    """Same contract as `paged_attention_reference`."""
    from pallas_kernels.cpu.decode import attend_decodes  # needs numba

    out = jnp.zeros((*q.shape[:2], settings.layout.value_size), jnp.float32)
    out = attend_decodes(out, q, pages, batch, table, settings).astype(q.dtype)
    if batch.decode_only:
        return out
    return attend_prefills(out, q, pages, batch, table, settings)
