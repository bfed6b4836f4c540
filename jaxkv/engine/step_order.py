"""Which of a step's rows come before all others: kernels may write those while they read."""

from collections.abc import Sequence

import numpy as np

from jaxkv.block_tables import BlockTable, StateTable
from jaxkv.planning.plan import CachePlan
from jaxkv.scheduling.output import SchedulerOutput


def count_decodes(plan: CachePlan, output: SchedulerOutput, tables: Sequence[BlockTable | StateTable]) -> int:
    """How many of the step's first rows have one token and read no block that another row of the step writes.

    tables: the step's, by group. A request may hit a block in the step that computes it, but only when it is
    admitted; such requests are the last of those with one token.
    """
    first = output.num_decodes
    while first and output.request_ids[first - 1] in output.admitted:
        first -= 1
    late = slice(first, output.num_decodes)
    reads_new = np.zeros(output.num_decodes - first, np.bool_)
    if not len(reads_new):
        return first
    for group, table in zip(plan.groups, tables, strict=True):
        if not isinstance(table, BlockTable):
            continue
        ids = table.block_ids[: len(output)]
        begin = output.num_computed // group.block_size - table.first_block[: len(output)]
        is_written = np.arange(ids.shape[1]) >= begin[:, None]
        written = ids[is_written & (ids > 0)]
        reads_new |= (np.isin(ids[late], written) & ~is_written[late]).any(axis=1)
    return first + int(np.argmax(reads_new)) if reads_new.any() else output.num_decodes
