"""Page writes on a GPU: one block of threads copies the words of one token to its page, in place."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.layout import LANES, AttentionPageLayout
from pallas_kernels.settings import AttentionSettings

COPY_WORDS = 32  # TMA reads from whole 128 bytes of shared memory


class WriteForm(NamedTuple):
    """How a token is written.

    width: words of a row of the pool as the kernel sees it, a divisor of every plane's words (but of scales).
    planes: those that are copied; the others have one word a token, which is stored.
    padded: words of a plane of a head in shared memory.
    """

    width: int
    planes: int
    padded: int


def form_of(layout: AttentionPageLayout) -> WriteForm:
    """The form of a layout's writes."""
    copied = [words for words in layout.token_words if words > 1]
    width = math.gcd(LANES, *copied)
    return WriteForm(width, len(copied), -(-max(copied) // COPY_WORDS) * COPY_WORDS)


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
    form = form_of(layout)
    tokens, heads = k.shape[:2]
    rows, table_width = table.block_ids.shape
    planes = layout.pack_tokens(k, v)
    copied = [jnp.pad(x, ((0, 0), (0, 0), (0, form.padded - x.shape[-1]))) for x in planes[: form.planes]]
    words = jnp.stack(copied, axis=2).reshape(tokens, heads, -1, form.width)
    stored = [x[..., 0] for x in planes[form.planes :]]
    seq = jnp.minimum(batch.seq_ids, rows - 1)
    entry = jnp.clip(batch.positions // layout.block_size - table.first_block[seq], 0, table_width - 1)
    page = table.block_ids[seq, entry] * settings.layer_slots + settings.layer_slot
    pool = jax.new_ref(pages.reshape(pages.shape[0], -1, form.width))
    plgpu.kernel(
        partial(_kernel, layout, form),
        scratch_types=[
            plgpu.SMEM(words.shape[1:], jnp.uint32),
            plgpu.Barrier(num_arrivals=heads),
        ],
        grid=(tokens,),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(
        batch.query_starts[batch.num_seqs].reshape(1),
        page.astype(jnp.int32),
        batch.positions % layout.block_size,
        words,
        stored,
        pool,
    )
    return jax.freeze(pool).reshape(pages.shape)


def _kernel(
    layout: AttentionPageLayout,
    form: WriteForm,
    count_ref,
    page_ref,
    slot_ref,
    words_ref,
    stored_refs,
    pages_ref,
    words_smem,
    barrier,
) -> None:
    """One token: a plane's words are some rows of the page."""
    token = lax.axis_index("token")

    @pl.when(token < count_ref[0])
    def _():
        heads = range(layout.num_kv_heads)
        page, slot = page_ref[token], slot_ref[token]
        for head in heads:
            plgpu.copy_gmem_to_smem(words_ref.at[token, head], words_smem.at[head], barrier)
        plgpu.barrier_wait(barrier)
        for head in heads:
            for plane in range(form.planes):
                count = layout.token_words[plane] // form.width
                row = layout.first_word(head, plane) // form.width + slot * count
                source = words_smem.at[head, pl.ds(plane * (form.padded // form.width), count)]
                plgpu.copy_smem_to_gmem(source, pages_ref.at[page, pl.ds(row, count)])
            for plane, stored_ref in enumerate(stored_refs, start=form.planes):
                word = layout.first_word(head, plane) + slot
                pages_ref[page, word // form.width, word % form.width] = stored_ref[token, head]
        plgpu.wait_smem_to_gmem(0)
