"""Page writes on a TPU: DMAs from the packed tokens to their pages, whole pages where a step fills them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.layout import LANES, AttentionPageLayout
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.xla.write import write_kv_xla


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
    """Same contract as `write_kv_reference`; in plain XLA for heads narrower than 128.

    `interpret` is `pallas_call`'s.
    """
    layout = settings.layout
    if not layout.rows_are_whole or len(set(layout.token_words)) > 1:  # no DMA writes a part of a row
        return write_kv_xla(pages, k, v, batch, table, settings)
    tokens = k.shape[0]
    rows, width = table.block_ids.shape
    parts = layout.head_size // LANES
    words = jnp.stack(layout.pack_tokens(k, v), axis=2).transpose(1, 2, 0, 3)  # [Hkv, planes, T, D]
    words = words.reshape(layout.num_kv_heads * layout.planes, tokens * parts, LANES)

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
        partial(_kernel, layout),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[anywhere, anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={len(scalars) + 1: 0},
        interpret=interpret,
        name="write_kv",
    )(*scalars, words, pages)


def _kernel(
    layout: AttentionPageLayout,
    count_ref,
    page_ref,
    slot_ref,
    fills_page_ref,
    words_ref,
    _,
    pages_ref,
    semaphore,
) -> None:
    """Starts every copy, then waits for every copy: no two touch the same rows."""
    parts = layout.head_size // LANES

    def copies(token, size):
        """One DMA a plane for `size` tokens from `token` on, all of one page."""
        for plane in range(layout.num_kv_heads * layout.planes):
            row = (plane * layout.block_size + slot_ref[token]) * parts
            yield pltpu.make_async_copy(
                words_ref.at[plane, pl.ds(token * parts, size * parts)],
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
