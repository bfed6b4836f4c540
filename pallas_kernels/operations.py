"""The public operations, and the ways to compute them."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.choice import Queries, choose_name
from pallas_kernels.gpu.attention import paged_attention_gpu
from pallas_kernels.gpu.support import refuses_on_gpu
from pallas_kernels.gpu.write import write_kv_gpu
from pallas_kernels.layout import LANES, AttentionPageLayout
from pallas_kernels.reference import paged_attention_reference, write_kv_reference
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.attention import paged_attention_tpu
from pallas_kernels.tpu.support import refuses_on_tpu
from pallas_kernels.tpu.write import write_kv_tpu
from pallas_kernels.xla.attention import paged_attention_xla
from pallas_kernels.xla.write import write_kv_xla


class Implementation(NamedTuple):
    """One way to compute the operations; `write` gets latents as K without V.

    `refuses` says why a shape cannot be served, or None; its last argument are queries, None where there are
    none.
    """

    attend: Callable[[jax.Array, jax.Array, RaggedBatch, GroupTable, AttentionSettings], jax.Array]
    write: Callable[
        [jax.Array, jax.Array, jax.Array | None, RaggedBatch, GroupTable, AttentionSettings], jax.Array
    ]
    refuses: Callable[[AttentionSettings, GroupTable, Queries | None], str | None]


def _refuses_nothing(settings: AttentionSettings, table: GroupTable, q: Queries | None) -> None:
    del settings, table, q


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(paged_attention_reference, write_kv_reference, _refuses_nothing),
    "xla": Implementation(paged_attention_xla, write_kv_xla, _refuses_nothing),
    "pallas_tpu": Implementation(paged_attention_tpu, write_kv_tpu, refuses_on_tpu),
    "pallas_gpu": Implementation(paged_attention_gpu, write_kv_gpu, refuses_on_gpu),
}


def choose_implementation(
    settings: AttentionSettings, table: GroupTable, name: str | None = None, q: Queries | None = None
) -> Implementation:
    """The implementation called `name`, or the platform's first choice if it serves this layer and table, and
    queries like `q [T, Hq, D]`.

    A shape that the platform's first choice does not serve falls back to "xla" and is logged once. Raises
    ValueError for an unknown name, and for a shape that the implementation asked for by name does not serve.
    """
    refusals = {known: partial(way.refuses, settings, table, q) for known, way in IMPLEMENTATIONS.items()}
    return IMPLEMENTATIONS[choose_name(refusals, settings.layout, name)]


def paged_attention(
    q: jax.Array,
    pages: jax.Array,
    batch: RaggedBatch,
    table: GroupTable,
    *,
    layout: AttentionPageLayout,
    layer_slot: int | jax.Array,
    layer_slots: int,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of this step's queries over their sequences' pages, decodes and prefill chunks in one call.

    `q [T, Hq, D]` with Hq a multiple of the layout's KV heads, query head i reading KV head
    `i // (Hq / Hkv)`; `pages uint32[num_pages, page_rows, 128]`, already holding this step's K and V
    (`write_kv`, `write_latent`). Returns `[T, Hq, Dv]` in q's dtype, zeros for padding tokens; sums are
    float32. Over latents, q is what the up-projection of K has been folded into (absorbed), and the result is
    still to be projected.
    `sinks [Hq]` and the other settings: see `AttentionSettings`. `implementation` is "reference", "xla" or
    "pallas_tpu" (None: the platform's). Raises ValueError where shapes disagree.
    """
    settings = AttentionSettings(
        layout=layout,
        layer_slot=layer_slot,
        layer_slots=layer_slots,
        scale=scale,
        sliding_window=sliding_window,
        attention_chunk_size=attention_chunk_size,
        softcap=softcap,
        sinks=sinks,
    )
    _check_pool(pages, layout)
    if q.ndim != 3 or q.shape[2] != layout.head_size or q.shape[1] % layout.num_kv_heads:
        raise ValueError(
            f"q must be [T, multiple of {layout.num_kv_heads}, {layout.head_size}], got {list(q.shape)}"
        )
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks must be [{q.shape[1]}], got {list(sinks.shape)}")
    chosen = choose_implementation(settings, table, implementation, q)
    return chosen.attend(q, pages, batch, table, settings)


def write_kv(
    pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    batch: RaggedBatch,
    table: GroupTable,
    *,
    layout: AttentionPageLayout,
    layer_slot: int | jax.Array,
    layer_slots: int,
    implementation: str | None = None,
) -> jax.Array:
    """The pool with this step's K and V written to one layer's pages; in place where `pages` is donated.

    `k [T, Hkv, D]` and `v [T, Hkv, Dv]` are rounded to the layout's dtype. Padding tokens are never written.
    Raises ValueError where shapes disagree, and for a layout of latents.
    """
    settings = AttentionSettings(layout=layout, layer_slot=layer_slot, layer_slots=layer_slots)
    _check_pool(pages, layout)
    if layout.latent:
        raise ValueError("a layout of latents keeps no K and V of their own: use write_latent")
    lead = (batch.positions.shape[0], layout.num_kv_heads)
    k_shape, v_shape = (*lead, layout.head_size), (*lead, layout.value_size)
    if k.shape != k_shape or v.shape != v_shape:
        wanted = f"{list(k_shape)}" if k_shape == v_shape else f"{list(k_shape)} and {list(v_shape)}"
        raise ValueError(f"k and v must be {wanted}, got {list(k.shape)} and {list(v.shape)}")
    return choose_implementation(settings, table, implementation).write(pages, k, v, batch, table, settings)


def write_latent(
    pages: jax.Array,
    latents: jax.Array,
    batch: RaggedBatch,
    table: GroupTable,
    *,
    layout: AttentionPageLayout,
    layer_slot: int | jax.Array,
    layer_slots: int,
    implementation: str | None = None,
) -> jax.Array:
    """The pool with this step's latent vectors (MLA) written to one layer's pages; as `write_kv` does.

    `latents [T, Hkv, D]`: the compressed K and V, then the part of K that carries positions. Raises
    ValueError where shapes disagree, and for a layout of K and V.
    """
    settings = AttentionSettings(layout=layout, layer_slot=layer_slot, layer_slots=layer_slots)
    _check_pool(pages, layout)
    if not layout.latent:
        raise ValueError("a layout of K and V keeps no latents: use write_kv")
    wanted = (batch.positions.shape[0], layout.num_kv_heads, layout.head_size)
    if latents.shape != wanted:
        raise ValueError(f"latents must be {list(wanted)}, got {list(latents.shape)}")
    return choose_implementation(settings, table, implementation).write(
        pages, latents, None, batch, table, settings
    )


def _check_pool(pages: jax.Array, layout: AttentionPageLayout) -> None:
    if pages.ndim != 3 or pages.shape[1:] != (layout.page_rows, LANES) or pages.dtype != "uint32":
        raise ValueError(
            f"pages must be uint32[num_pages, {layout.page_rows}, {LANES}], "
            f"got {pages.dtype}{list(pages.shape)}"
        )
