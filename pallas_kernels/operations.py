"""The public operations, and the ways to compute them."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax

from pallas_kernels.batch import GroupTable, RaggedBatch, num_tokens
from pallas_kernels.choice import Queries, choose_name
from pallas_kernels.cpu.attention import paged_attention_cpu, refuses_on_cpu
from pallas_kernels.gpu.attention import paged_attention_gpu
from pallas_kernels.gpu.support import refuses_on_gpu
from pallas_kernels.gpu.write import write_kv_gpu
from pallas_kernels.layout import AttentionPageLayout
from pallas_kernels.outputs import AttentionResult
from pallas_kernels.pool import check_pool
from pallas_kernels.reference import paged_attention_reference, write_kv_reference
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.attention import paged_attention_tpu, write_and_attend_tpu
from pallas_kernels.tpu.support import refuses_on_tpu
from pallas_kernels.tpu.write import write_kv_tpu
from pallas_kernels.xla.attention import paged_attention_xla
from pallas_kernels.xla.write import write_kv_xla


class Implementation(NamedTuple):
    """One way to compute the operations; latents are given as K without V.

    `refuses` says why a shape cannot be served, or None; its last argument are queries, None where there are
    none. `write_and_attend` (q, k, v, pages, ...) does both in fewer kernels; None: `write`, then `attend`.
    """

    attend: Callable[[jax.Array, jax.Array, RaggedBatch, GroupTable, AttentionSettings], jax.Array]
    write: Callable[
        [jax.Array, jax.Array, jax.Array | None, RaggedBatch, GroupTable, AttentionSettings], jax.Array
    ]
    refuses: Callable[[AttentionSettings, GroupTable, Queries | None], str | None]
    write_and_attend: (
        Callable[
            [
                jax.Array,
                jax.Array,
                jax.Array | None,
                jax.Array,
                RaggedBatch,
                GroupTable,
                AttentionSettings,
            ],
            AttentionResult,
        ]
        | None
    ) = None


def _refuses_nothing(settings: AttentionSettings, table: GroupTable, q: Queries | None) -> None:
    del settings, table, q


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(paged_attention_reference, write_kv_reference, _refuses_nothing),
    "xla": Implementation(paged_attention_xla, write_kv_xla, _refuses_nothing),
    "numba": Implementation(paged_attention_cpu, write_kv_xla, refuses_on_cpu),
    "pallas_tpu": Implementation(paged_attention_tpu, write_kv_tpu, refuses_on_tpu, write_and_attend_tpu),
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
    `sinks [Hq]` and the other settings: see `AttentionSettings`. `implementation` is "reference", "xla",
    "numba", "pallas_tpu" or "pallas_gpu" (None: the platform's). Raises ValueError where shapes disagree.
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
    check_pool(pages, layout.page_rows)
    _check_queries(q, batch, settings)
    chosen = choose_implementation(settings, table, implementation, q)
    return chosen.attend(q, pages, batch, table, settings)


def write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
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
) -> AttentionResult:
    """This step's K and V written to one layer's pages, and attention over all that is then stored.

    The same as `write_kv(pages, k, v, ...)`, or without `v` `write_latent(pages, k, ...)`, and then
    `paged_attention(q, ...)`, in one kernel where an implementation has such a one. Arguments, results and
    errors as theirs; in place where `pages` is donated.
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
    check_pool(pages, layout.page_rows)
    _check_queries(q, batch, settings)
    _check_new(k, v, batch, layout)
    chosen = choose_implementation(settings, table, implementation, q)
    if chosen.write_and_attend is not None:
        return chosen.write_and_attend(q, k, v, pages, batch, table, settings)
    pages = chosen.write(pages, k, v, batch, table, settings)
    return AttentionResult(chosen.attend(q, pages, batch, table, settings), pages)


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
    Other tokens' words stay as they are; where the scales of an 8-bit page end inside a row of 128 words, the
    padding in that row may become 0. Raises ValueError where shapes disagree, and for a layout of latents.
    """
    settings = AttentionSettings(layout=layout, layer_slot=layer_slot, layer_slots=layer_slots)
    return _write(pages, k, v, batch, table, settings, implementation)


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
    return _write(pages, latents, None, batch, table, settings, implementation)


def _write(
    pages: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
    implementation: str | None,
) -> jax.Array:
    check_pool(pages, settings.layout.page_rows)
    _check_new(k, v, batch, settings.layout)
    return choose_implementation(settings, table, implementation).write(pages, k, v, batch, table, settings)


def _check_queries(q: jax.Array, batch: RaggedBatch, settings: AttentionSettings) -> None:
    tokens, heads, size = num_tokens(batch), settings.layout.num_kv_heads, settings.layout.head_size
    sinks = settings.sinks
    if q.ndim != 3 or (q.shape[0], q.shape[2]) != (tokens, size) or q.shape[1] % heads:
        raise ValueError(f"q must be [{tokens}, multiple of {heads}, {size}], got {list(q.shape)}")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks must be [{q.shape[1]}], got {list(sinks.shape)}")


def _check_new(k: jax.Array, v: jax.Array | None, batch: RaggedBatch, layout: AttentionPageLayout) -> None:
    """K and V, or latents alone, are what the layout keeps of the step's tokens."""
    if layout.latent and v is not None:
        raise ValueError("a layout of latents keeps no V of its own: leave it out, or use write_latent")
    if v is None and not layout.latent:
        raise ValueError("a layout of K and V keeps no latents: give V as well, or use write_kv")
    lead = (num_tokens(batch), layout.num_kv_heads)
    given, wanted = [k.shape], [(*lead, layout.head_size)]
    if v is not None:
        given, wanted = [*given, v.shape], [*wanted, (*lead, layout.value_size)]
    if given != wanted:
        raise ValueError(
            f"{'latents' if v is None else 'k and v'} must be {_listed(wanted)}, got {_listed(given)}"
        )


def _listed(shapes: list[tuple[int, ...]]) -> str:
    """All shapes, or the one that they share."""
    return " and ".join(dict.fromkeys(str(list(shape)) for shape in shapes))
