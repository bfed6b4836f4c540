"""Page writes on a TPU: DMAs from the packed tokens to their pages, whole pages where a step fills them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.layout import KEY_SCALES, LANES, AttentionPageLayout
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.neighbours import SharedRows, SharedScaleRows
from pallas_kernels.tpu.write_shared import write_shared_rows


def write_kv_tpu(
    pages: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
    *,
    interpret: Any = False,
) -> jax.Array:
    """Same contract as `write_kv_reference`. `interpret` is `pallas_call`'s."""
    layout = settings.layout
    planes = layout.pack_tokens(k, v)
    numbers = planes[:KEY_SCALES] if layout.is_quantised else planes
    whole = {plane: words for plane, words in enumerate(numbers) if words.shape[2] % LANES == 0}
    if whole:
        pages = _write_whole_rows(pages, whole, batch, table, settings, interpret=interpret)
    shared = [(SharedRows(layout, plane), words) for plane, words in enumerate(numbers) if plane not in whole]
    if layout.is_quantised:
        shared.append((SharedScaleRows(layout), jnp.concatenate(planes[KEY_SCALES:], axis=1)))
    for rows, words in shared:
        pages = write_shared_rows(pages, words, rows, batch, table, settings, interpret=interpret)
    return pages


def _write_whole_rows(
    pages: jax.Array,
    planes: dict[int, jax.Array],
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
    *,
    interpret: Any,
) -> jax.Array:
    """The pool with words of the step's tokens in some planes, `uint32[T, Hkv, multiple of 128]` each."""
    layout = settings.layout
    tokens = batch.positions.shape[0]
    rows, width = table.block_ids.shape
    words = [x.transpose(1, 0, 2).reshape(x.shape[1], -1, LANES) for x in planes.values()]
    seq = jnp.minimum(batch.seq_ids, rows - 1)
    entry = jnp.clip(batch.positions // layout.block_size - table.first_block[seq], 0, width - 1)
    page = table.block_ids[seq, entry] * settings.layer_slots + settings.layer_slot
    slot = batch.positions % layout.block_size
    left = batch.query_starts[seq + 1] - jnp.arange(tokens)
    fills_page = (slot == 0) & (left >= layout.block_size)
    scalars = (
        batch.query_starts[batch.num_seqs].reshape(1),
        page.astype(jnp.int32),
        slot.astype(jnp.int32),
        fills_page.astype(jnp.int32),
    )
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(_kernel, layout, tuple(planes)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[anywhere] * (len(words) + 1),
            out_specs=anywhere,
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={len(scalars) + len(words): 0},
        interpret=interpret,
        name="write_kv",
    )(*scalars, *words, pages)


def _kernel(
    layout: AttentionPageLayout,
    planes: tuple[int, ...],
    count_ref,
    page_ref,
    slot_ref,
    fills_page_ref,
    *refs,
) -> None:
    """Starts every copy, then waits for every copy: no two touch the same rows."""
    *words_refs, _, pages_ref, semaphore = refs

    def copies(token, size):
        """One DMA a head and plane for `size` tokens from `token` on, all of one page."""
        for head in range(layout.num_kv_heads):
            for plane, words_ref in zip(planes, words_refs, strict=True):
                parts = layout.token_words[plane] // LANES
                row = layout.first_word(head, plane) // LANES + slot_ref[token] * parts
                yield pltpu.make_async_copy(
                    words_ref.at[head, pl.ds(token * parts, size * parts)],
                    pages_ref.at[page_ref[token], pl.ds(row, size * parts)],
                    semaphore,
                )

    def walk(act):
        """Calls `act` on every copy, in steps of a whole page where the step's tokens fill one."""

        def step(token):
            whole = fills_page_ref[token] == 1

            @pl.when(whole)
            def _():
                for copy in copies(token, layout.block_size):
                    act(copy)

            @pl.when(jnp.logical_not(whole))
            def _():
                for copy in copies(token, 1):
                    act(copy)

            return token + jnp.where(whole, layout.block_size, 1)

        lax.while_loop(lambda token: token < count_ref[0], step, jnp.int32(0))

    walk(lambda copy: copy.start())
    walk(lambda copy: copy.wait())
