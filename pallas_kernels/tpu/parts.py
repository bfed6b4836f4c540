"""Steps whose tables are too large for SMEM: served in parts, a run of sequences each."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.batch import GroupTable, RaggedBatch

TABLE_BYTES = 512 << 10  # SMEM also holds the schedule and must not be filled to the brim


class Part(NamedTuple):
    """Sequences from `first` on: the batch with the counts of these alone, and their rows of the table."""

    first: int
    batch: RaggedBatch
    table: GroupTable


def parts_of(batch: RaggedBatch, table: GroupTable) -> Iterator[Part]:
    """The parts of a step: one where the table fits."""
    rows, width = table.block_ids.shape
    size = max(TABLE_BYTES // (4 * width), 1)
    for first in range(0, rows, size):
        end = min(first + size, rows)
        mine = replace(
            batch,
            num_decodes=jnp.clip(batch.num_decodes, first, end),
            num_seqs=jnp.clip(batch.num_seqs, first, end),
        )
        yield Part(first, mine, GroupTable(table.block_ids[first:end], table.first_block[first:end]))
