"""Attention over a pool of pages: plain references, a form that is fast on a CPU, and Pallas kernels.

Imports jax only. The public names:

- `AttentionPageLayout`: where the words of a page are;
- `RaggedBatch`, `GroupTable`: the arrays that say which tokens and blocks a step touches;
- `write_kv`, `write_latent`, `paged_attention`, `write_and_attend`: the operations, each with interchangeable
  implementations.
"""

from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.layout import AttentionPageLayout
from pallas_kernels.operations import paged_attention, write_and_attend, write_kv, write_latent

__all__ = [
    "AttentionPageLayout",
    "GroupTable",
    "RaggedBatch",
    "paged_attention",
    "write_and_attend",
    "write_kv",
    "write_latent",
]
