"""Page writes on a TPU: DMAs from the packed tokens to their pages."""

from functools import partial
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.layout import AttentionPageLayout
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.neighbours import shares_of
from pallas_kernels.tpu.page_runs import PageRuns, new_pages
from pallas_kernels.tpu.page_writer import PageWriter


def write_kv_tpu(
    pages: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    batch: RaggedBatch,
    table: GroupTable,
    settings: AttentionSettings,
    *,
    first_seq: int | jax.Array = 0,
    interpret: Any = False,
) -> jax.Array:
    """Same contract as `write_kv_reference`, but for sequences from `first_seq` on alone.

    Where the scales of an 8-bit page end inside a row, some of the padding in that row becomes 0.
    `interpret` is `pallas_call`'s.
    """
    new = new_pages(k, v, batch, table, settings, first_seq=first_seq)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(_kernel, settings.layout),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(new.runs),
            grid=(1,),
            in_specs=[anywhere] * (len(new.rows) + 1),
            out_specs=anywhere,
            scratch_shapes=PageWriter.scratch(settings.layout, new),
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={len(new.runs) + len(new.rows): 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=interpret,
        name="write_kv",
    )(*new.runs, *new.rows, pages)


def _kernel(layout: AttentionPageLayout, *refs) -> None:
    runs, refs = PageRuns(*refs[: len(PageRuns._fields)]), refs[len(PageRuns._fields) :]
    shares = len(shares_of(layout))
    rows, (_, pages, *scratch) = refs[:shares], refs[shares:]
    writer = PageWriter(layout, runs, rows, pages, *scratch)
    writer.start()
    writer.wait()
