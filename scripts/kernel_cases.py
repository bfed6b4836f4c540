"""The shapes at which `check_kernels.py` looks at the TPU kernels: what published models ask of one call."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import AttentionPageLayout, GroupTable, RaggedBatch, write_kv
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.attention import DECODE_CHUNK, PREFILL_CHUNK, PREFILL_ROWS, plan_call
from pallas_kernels.tpu.kernel import KernelScalars, attend_tiles

POOL_BYTES = 1 << 30  # at least


@dataclass(frozen=True, kw_only=True)
class Case:
    """`sequences` of `context` tokens, the last `new` of each in this step; kernel "attention" or "write"."""

    kernel: str
    block_size: int
    kv_heads: int
    head_size: int
    q_heads: int
    dtype: str = "bfloat16"
    sequences: int = 64
    context: int = 8192
    new: int = 1
    window: int | None = None
    quick: bool = False

    @property
    def layout(self) -> AttentionPageLayout:
        """The page."""
        return AttentionPageLayout.fitting(
            block_size=self.block_size,
            num_kv_heads=self.kv_heads,
            head_size=self.head_size,
            dtype=self.dtype,
        )


class Built(NamedTuple):
    """A function, its arguments (small integers real, the rest shapes) and the index of the donated one."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: int | None


_GEMMA_27B = Case(  # under tensor parallel 4
    kernel="attention", block_size=128, kv_heads=4, head_size=128, q_heads=8
)
_GEMMA_270M = Case(kernel="attention", block_size=16, kv_heads=1, head_size=256, q_heads=4, sequences=8)
_CHUNK = replace(_GEMMA_27B, sequences=1, new=2048)
CASES: dict[str, Case] = {
    "gemma3-27b/4 decode": replace(_GEMMA_27B, quick=True),
    "gemma3-27b/4 decode window": replace(_GEMMA_27B, window=1024),
    "gemma3-27b/4 prefill": _CHUNK,
    "gemma3-27b/4 prefill window": replace(_CHUNK, window=1024),
    "gemma3-270m decode": _GEMMA_270M,
    "gemma3-270m decode float32": replace(_GEMMA_270M, dtype="float32"),
    "gemma3-270m prefill window": replace(_GEMMA_270M, sequences=1, new=2048, window=512),
    "gemma3-27b/4 write decode": replace(_GEMMA_27B, kernel="write", quick=True),
    "gemma3-27b/4 write prefill": replace(_CHUNK, kernel="write"),
}


def for_cost_tool(name: str) -> tuple[Any, Any]:
    """The jitted function and arguments of a case."""
    built = build(CASES[name])
    donate = () if built.donate is None else (built.donate,)
    return jax.jit(built.function, donate_argnums=donate), built.arguments


def build(case: Case) -> Built:
    """The one call that a case is about, its tables full and shuffled."""
    oldest = (
        0 if case.window is None else max(case.context - case.new - case.window + 1, 0) // case.block_size
    )
    width = -(-case.context // case.block_size) - oldest
    # A pool that fits VMEM is moved there, and the kernel seems to need no HBM.
    num_blocks = max(case.sequences * width + 1, POOL_BYTES // (case.layout.page_rows * 512))
    ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks))[: case.sequences * width]
    table = GroupTable(_ints(ids.reshape(case.sequences, width)), _ints(np.full(case.sequences, oldest)))
    pages = jax.ShapeDtypeStruct((num_blocks, case.layout.page_rows, 128), jnp.uint32)
    if case.kernel == "write":
        return _build_write(case, table, pages)
    return _build_attention(case, table, pages)


def _build_attention(case: Case, table: GroupTable, pages: jax.ShapeDtypeStruct) -> Built:
    """The kernel's own call: its scalars are arguments, so that a tool can read them."""
    group = case.q_heads // case.kv_heads
    decode = case.new == 1
    size = 1 if decode else PREFILL_ROWS // group
    tiles = case.new // size
    row_multiple = 16 if case.dtype == "bfloat16" else 8
    scalars = KernelScalars(
        info=_ints([0, case.sequences * tiles - 1]),
        seq=_ints(np.repeat(np.arange(case.sequences), tiles)),
        position=_ints(np.tile(case.context - case.new + np.arange(tiles) * size, case.sequences)),
        num_queries=_ints(np.full(case.sequences * tiles, size)),
        first_block=table.first_block,
        block_ids=table.block_ids.reshape(-1),
    )
    rows = -(-size * group // row_multiple) * row_multiple
    shape = (case.sequences * tiles, case.kv_heads, rows, case.head_size)
    settings = AttentionSettings(
        layout=case.layout, layer_slot=0, layer_slots=1, scale=0.06, sliding_window=case.window
    )
    plan = plan_call(settings, group, table.block_ids.shape[1], DECODE_CHUNK if decode else PREFILL_CHUNK)

    def attend(scalars: KernelScalars, q: jax.Array, pages: jax.Array) -> jax.Array:
        return attend_tiles(scalars, q, pages, plan)

    return Built(attend, (scalars, jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype)), pages), None)


def _build_write(case: Case, table: GroupTable, pages: jax.ShapeDtypeStruct) -> Built:
    """The whole operation; its scalars are computed on the device, so a tool cannot follow them."""
    starts = _ints(np.arange(case.sequences + 1) * case.new)
    batch = RaggedBatch(
        positions=_ints(np.tile(np.arange(case.context - case.new, case.context), case.sequences)),
        seq_ids=_ints(np.repeat(np.arange(case.sequences), case.new)),
        query_starts=starts,
        seq_lens=_ints(np.full(case.sequences, case.context)),
        num_decodes=_ints(case.sequences if case.new == 1 else 0),
        num_seqs=_ints(case.sequences),
    )
    tokens = (case.sequences * case.new, case.kv_heads, case.head_size)
    kv = jax.ShapeDtypeStruct(tokens, jnp.dtype(case.dtype))

    def write(
        pages: jax.Array, k: jax.Array, v: jax.Array, batch: RaggedBatch, table: GroupTable
    ) -> jax.Array:
        place = {"layout": case.layout, "layer_slot": 0, "layer_slots": 1}
        return write_kv(pages, k, v, batch, table, implementation="pallas_tpu", **place)

    return Built(write, (pages, kv, kv, batch, table), 0)


def _ints(values: Any) -> Any:
    """Int32, in numpy: a cost tool reads real values."""
    return np.asarray(values, np.int32)
