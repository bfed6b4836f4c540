"""Page writes on a GPU: one block of threads copies the words of one token to its page, in place."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.layout import AttentionPageLayout
from pallas_kernels.settings import AttentionSettings


def write_kv_gpu(
    pages: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
    *,
    interpret: Any = None,
) -> jax.Array:
    """Same contract as `write_kv_reference`. `interpret` is `plgpu.kernel`'s."""
    layout = settings.layout
    tokens, _, head_size = k.shape
    rows, width = table.block_ids.shape
    planes = layout.num_kv_heads * layout.planes
    words = jnp.stack(layout.pack_tokens(k, v), axis=2).reshape(tokens, planes, head_size)
    seq = jnp.minimum(batch.seq_ids, rows - 1)
    entry = jnp.clip(batch.positions // layout.block_size - table.first_block[seq], 0, width - 1)
    page = table.block_ids[seq, entry] * settings.layer_slots + settings.layer_slot
    pool = jax.new_ref(pages.reshape(pages.shape[0], -1, head_size))
    plgpu.kernel(
        partial(_kernel, layout),
        scratch_types=[plgpu.SMEM((planes, head_size), jnp.uint32), plgpu.Barrier()],
        grid=(tokens,),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(
        batch.query_starts[batch.num_seqs].reshape(1),
        page.astype(jnp.int32),
        batch.positions % layout.block_size,
        words,
        pool,
    )
    return jax.freeze(pool).reshape(pages.shape)


def _kernel(
    layout: AttentionPageLayout, count_ref, page_ref, slot_ref, words_ref, pages_ref, words_smem, barrier
) -> None:
    """One token: a plane's words are one row of the page."""
    token = lax.axis_index("token")

    @pl.when(token < count_ref[0])
    def _():
        plgpu.copy_gmem_to_smem(words_ref.at[token], words_smem, barrier)
        plgpu.barrier_wait(barrier)
        for plane in range(words_smem.shape[0]):
            row = plane * layout.block_size + slot_ref[token]
            plgpu.copy_smem_to_gmem(words_smem.at[plane], pages_ref.at[page_ref[token], row])
        plgpu.wait_smem_to_gmem(0)
