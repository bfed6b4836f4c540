"""Sizes of the attention kernels for one shape: a table of tuned ones (`tuned.json`), else the rule.

`scripts/tune_kernels.py` makes the table. It has the shapes alone for which something beats the rule.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.chip import chip_name

logger = logging.getLogger(__name__)
TABLE = Path(__file__).with_name("tuned.json")


class Sizes(NamedTuple):
    """Decode: tokens of a run, and runs of a step. Prefill: tokens of a chunk, and query rows of a tile.

    All are at most: what does not fit VMEM, or the sequences, is cut.
    """

    tokens: int
    most: int


class Shape(NamedTuple):
    """What sizes depend on. group: query heads of a KV head; window: tokens a query sees, 0 for all;
    `head_size_v` and `latent` as in `AttentionPageLayout`.
    """

    kernel: str
    chip: str
    dtype: str
    kv_heads: int
    group: int
    head_size: int
    head_size_v: int
    latent: bool
    block_size: int
    window: int


_forced: list[Sizes] = []


def shape_of(kernel: str, settings: AttentionSettings, group: int) -> Shape:
    """The key of a layer on the chip that is compiled for; `kernel` is "decode" or "prefill"."""
    layout = settings.layout
    return Shape(
        kernel=kernel,
        chip=chip_name(),
        dtype=layout.dtype,
        kv_heads=layout.num_kv_heads,
        group=group,
        head_size=layout.head_size,
        head_size_v=layout.value_size,
        latent=layout.latent,
        block_size=layout.block_size,
        window=settings.span or 0,
    )


def sizes_of(kernel: str, settings: AttentionSettings, group: int, rule: Sizes) -> Sizes:
    """The sizes for a layer: of the table, which is logged when first used, else the rule's."""
    if _forced:
        return _forced[-1]
    return _tuned(shape_of(kernel, settings, group)) or rule


@cache
def _tuned(shape: Shape) -> Sizes | None:
    sizes = _table().get(shape)
    if sizes is not None:
        logger.info("%s is tuned: %s", shape, sizes)
    return sizes


@cache
def _table() -> dict[Shape, Sizes]:
    rows = json.loads(TABLE.read_text(encoding="utf-8"))
    return {Shape(**row["shape"]): Sizes(**row["sizes"]) for row in rows}


@contextmanager
def forced(sizes: Sizes) -> Iterator[None]:
    """These sizes for every layer, so that a tuner can compare some."""
    _forced.append(sizes)
    try:
        yield
    finally:
        _forced.pop()
