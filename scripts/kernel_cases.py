"""The shapes at which `check_kernels.py` looks at the TPU kernels: what published models ask of one call."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import AttentionPageLayout, GroupTable, RaggedBatch, write_kv, write_latent
from pallas_kernels.outputs import AttentionResult
from pallas_kernels.settings import AttentionSettings
from pallas_kernels.tpu.decode import DecodeScalars, attend_decodes
from pallas_kernels.tpu.decode_plan import plan_decode
from pallas_kernels.tpu.new_rows import NewRows
from pallas_kernels.tpu.prefill import PrefillScalars, attend_tiles
from pallas_kernels.tpu.prefill_plan import plan_prefill

POOL_BYTES = 1 << 30  # at least


@dataclass(frozen=True, kw_only=True)
class Case:
    """`sequences` of `context` tokens, the last `new` of each in this step; kernel "attention" or "write".

    `head_size_v` and `latent` as in `AttentionPageLayout`. `writes`: attention also writes the new tokens.
    """

    kernel: str
    block_size: int
    kv_heads: int
    head_size: int
    q_heads: int
    head_size_v: int | None = None
    latent: bool = False
    dtype: str = "bfloat16"
    sequences: int = 64
    context: int = 8192
    new: int = 1
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    writes: bool = False
    quick: bool = False

    @property
    def oldest(self) -> int:
        """The first position that this step's first token sees."""
        first = self.context - self.new
        if self.window is not None:
            return max(first - self.window + 1, 0)
        return 0 if self.chunk is None else first // self.chunk * self.chunk

    @property
    def activation_dtype(self) -> jnp.dtype:
        """Of q, and of new K and V: as the pages' where these are no 8-bit numbers, else bfloat16."""
        return jnp.dtype("bfloat16" if self.layout.is_quantised else self.dtype)

    @property
    def layout(self) -> AttentionPageLayout:
        """The page."""
        return AttentionPageLayout.fitting(
            block_size=self.block_size,
            num_kv_heads=self.kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v,
            latent=self.latent,
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
_GPT_OSS = Case(  # 120B under tensor parallel 4
    kernel="attention", block_size=128, kv_heads=2, head_size=64, q_heads=16, sinks=True
)
_SCOUT = Case(  # Llama 4 Scout under tensor parallel 4
    kernel="attention", block_size=128, kv_heads=2, head_size=128, q_heads=10, context=12_288
)
_PHI2 = Case(kernel="attention", block_size=128, kv_heads=8, head_size=80, q_heads=8)  # under 4
_PHI3_MINI = Case(kernel="attention", block_size=128, kv_heads=8, head_size=96, q_heads=8)  # under 4
_MIMO_V2 = Case(  # full layers, under tensor parallel 4
    kernel="attention", block_size=128, kv_heads=1, head_size=192, head_size_v=128, q_heads=16
)
_DEEPSEEK_V3 = Case(  # every device keeps all latents; 128 heads under tensor parallel 1
    kernel="attention", block_size=128, kv_heads=1, head_size=576, head_size_v=512, latent=True, q_heads=128
)
_CHUNK = replace(_GEMMA_27B, sequences=1, new=2048)
CASES: dict[str, Case] = {
    "gemma3-27b/4 decode": replace(_GEMMA_27B, quick=True),
    "gemma3-27b/4 decode window": replace(_GEMMA_27B, window=1024),
    "gemma3-27b/4 prefill": replace(_CHUNK, quick=True),
    "gemma3-27b/4 prefill window": replace(_CHUNK, window=1024),
    "gemma3-270m decode": _GEMMA_270M,
    "gemma3-270m decode float32": replace(_GEMMA_270M, dtype="float32"),
    "gemma3-270m prefill window": replace(_GEMMA_270M, sequences=1, new=2048, window=512),
    "gpt-oss-120b/4 decode": replace(_GPT_OSS, quick=True),
    "gpt-oss-120b/4 decode window": replace(_GPT_OSS, window=128),
    "gpt-oss-120b/4 prefill": replace(_GPT_OSS, sequences=1, new=2048),
    "gpt-oss-120b/4 prefill window": replace(_GPT_OSS, sequences=1, new=2048, window=128),
    "llama4-scout/4 decode chunk": replace(_SCOUT, chunk=8192),
    "llama4-scout/4 prefill chunk": replace(_SCOUT, chunk=8192, sequences=1, new=2048),
    "phi-2/4 decode": _PHI2,
    "phi-2/4 prefill": replace(_PHI2, sequences=1, context=2048, new=2048),
    "phi-3-mini/4 decode": _PHI3_MINI,
    "phi-3-mini/4 prefill": replace(_PHI3_MINI, sequences=1, new=2048),
    "mimo-v2/4 decode": _MIMO_V2,
    "mimo-v2/4 prefill": replace(_MIMO_V2, sequences=1, new=2048),
    "deepseek-v3 decode": _DEEPSEEK_V3,
    "deepseek-v3/4 decode": replace(_DEEPSEEK_V3, q_heads=32),
    "deepseek-v3/8 decode": replace(_DEEPSEEK_V3, q_heads=16, quick=True),
    "deepseek-v3/8 prefill": replace(_DEEPSEEK_V3, q_heads=16, sequences=1, new=2048),
    "gemma3-27b/4 decode fp8": replace(_GEMMA_27B, dtype="float8_e4m3fn", quick=True),
    "gemma3-27b/4 decode window fp8": replace(_GEMMA_27B, dtype="float8_e4m3fn", window=1024),
    "gemma3-27b/4 prefill fp8": replace(_CHUNK, dtype="float8_e4m3fn"),
    "gemma3-27b/4 decode int8": replace(_GEMMA_27B, dtype="int8"),
    "gemma3-27b/4 prefill int8": replace(_CHUNK, dtype="int8"),
    "gemma3-270m decode int8": replace(_GEMMA_270M, dtype="int8", block_size=256),
    "gpt-oss-120b/4 decode fp8": replace(_GPT_OSS, dtype="float8_e4m3fn"),
    "gpt-oss-120b/4 decode window fp8": replace(_GPT_OSS, dtype="float8_e4m3fn", window=128),
    "gemma3-27b/4 decode, written": replace(_GEMMA_27B, writes=True, quick=True),
    "gemma3-27b/4 decode window, written": replace(_GEMMA_27B, window=1024, writes=True),
    "gpt-oss-120b/4 decode window, written": replace(_GPT_OSS, window=128, writes=True),
    "gpt-oss-120b/4 decode, written": replace(_GPT_OSS, writes=True),
    "llama4-scout/4 decode chunk, written": replace(_SCOUT, chunk=8192, writes=True),
    "gemma3-270m decode float32, written": replace(_GEMMA_270M, dtype="float32", writes=True),
    "gemma3-27b/4 decode fp8, written": replace(_GEMMA_27B, dtype="float8_e4m3fn", writes=True),
    "phi-2/4 decode, written": replace(_PHI2, writes=True),
    "mimo-v2/4 decode, written": replace(_MIMO_V2, writes=True),
    "deepseek-v3/8 decode, written": replace(_DEEPSEEK_V3, q_heads=16, writes=True),
    "gemma3-27b/4 write decode": replace(_GEMMA_27B, kernel="write", quick=True),
    "gemma3-27b/4 write prefill": replace(_CHUNK, kernel="write"),
    "gemma3-27b/4 write decode fp8": replace(_GEMMA_27B, kernel="write", dtype="float8_e4m3fn"),
    "gemma3-27b/4 write prefill int8": replace(_CHUNK, kernel="write", dtype="int8"),
    "gpt-oss-120b/4 write decode": replace(_GPT_OSS, kernel="write"),
    "phi-2/4 write decode": replace(_PHI2, kernel="write"),
    "phi-3-mini/4 write prefill": replace(_PHI3_MINI, kernel="write", sequences=1, new=2048),
    "mimo-v2/4 write decode": replace(_MIMO_V2, kernel="write"),
    "deepseek-v3 write decode": replace(_DEEPSEEK_V3, kernel="write", quick=True),
    "deepseek-v3 write prefill": replace(_DEEPSEEK_V3, kernel="write", sequences=1, new=2048),
}


def for_cost_tool(name: str) -> tuple[Any, Any]:
    """The jitted function and arguments of a case."""
    built = build(CASES[name])
    donate = () if built.donate is None else (built.donate,)
    return jax.jit(built.function, donate_argnums=donate), built.arguments


def build(case: Case) -> Built:
    """The one call that a case is about, its tables full and shuffled."""
    oldest = case.oldest // case.block_size
    width = -(-case.context // case.block_size) - oldest
    # A pool that fits VMEM is moved there, and the kernel seems to need no HBM.
    num_blocks = max(case.sequences * width + 1, POOL_BYTES // (case.layout.page_rows * 512))
    ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks))[: case.sequences * width]
    table = GroupTable(_ints(ids.reshape(case.sequences, width)), _ints(np.full(case.sequences, oldest)))
    pages = jax.ShapeDtypeStruct((num_blocks, case.layout.page_rows, 128), jnp.uint32)
    if case.kernel == "write":
        return _build_write(case, table, pages)
    build_kernel = _build_decode if case.new == 1 else _build_prefill
    return build_kernel(case, table, pages)


def _build_decode(case: Case, table: GroupTable, pages: jax.ShapeDtypeStruct) -> Built:
    """The decode kernel's own call: its scalars are arguments, so that a tool can read them."""
    settings = settings_of(case)
    dtype = case.activation_dtype
    rows, width = table.block_ids.shape
    plan = plan_decode(settings, q_heads=case.q_heads, dtype=dtype, rows=rows, table_width=width)
    scalars = DecodeScalars(
        info=_ints([0, rows]),
        seq_lens=_ints(np.full(rows, case.context)),
        first_block=table.first_block,
        block_ids=table.block_ids.reshape(-1),
    )
    whole = -(-rows // plan.sequences) * plan.sequences
    place_rows, key_width = plan.math.place_rows, plan.math.loader.key_width
    q = jax.ShapeDtypeStruct((whole, plan.math.products, place_rows, key_width), dtype)
    new = jax.ShapeDtypeStruct((whole, NewRows(case.layout).count, 128), jnp.uint32)

    def attend(scalars: DecodeScalars, q: jax.Array, pages: jax.Array) -> jax.Array:
        sinks = None if settings.sinks is None else plan.math.arrange_sinks(settings.sinks)
        return attend_decodes(scalars, q, sinks, pages, plan, settings).out

    def write_and_attend(
        scalars: DecodeScalars, q: jax.Array, pages: jax.Array, new: jax.Array
    ) -> AttentionResult:
        sinks = None if settings.sinks is None else plan.math.arrange_sinks(settings.sinks)
        return attend_decodes(scalars, q, sinks, pages, plan, settings, new=new)

    if case.writes:
        return Built(write_and_attend, (scalars, q, pages, new), 2)
    return Built(attend, (scalars, q, pages), None)


def _build_prefill(case: Case, table: GroupTable, pages: jax.ShapeDtypeStruct) -> Built:
    """The same of the prefill kernel."""
    settings = settings_of(case)
    group = case.q_heads // case.kv_heads
    dtype = case.activation_dtype
    plan = plan_prefill(
        settings,
        group=group,
        tokens=case.sequences * case.new,
        table_width=table.block_ids.shape[1],
        dtype=dtype,
    )
    starts = np.arange(0, case.new, plan.tile)
    tiles = len(starts)
    scalars = PrefillScalars(
        info=_ints([0, case.sequences * tiles - 1]),
        seq=_ints(np.repeat(np.arange(case.sequences), tiles)),
        position=_ints(np.tile(case.context - case.new + starts, case.sequences)),
        num_queries=_ints(np.tile(np.minimum(plan.tile, case.new - starts), case.sequences)),
        first_block=table.first_block,
        block_ids=table.block_ids.reshape(-1),
    )
    shape = (case.sequences * tiles, case.kv_heads, plan.math.place_rows, plan.math.loader.key_width)

    def attend(scalars: PrefillScalars, q: jax.Array, pages: jax.Array) -> jax.Array:
        return attend_tiles(scalars, q, plan.math.tops_of_sinks(plan.tile), pages, plan)

    return Built(attend, (scalars, jax.ShapeDtypeStruct(shape, dtype), pages), None)


def settings_of(case: Case) -> AttentionSettings:
    """The layer of a case."""
    return AttentionSettings(
        layout=case.layout,
        layer_slot=0,
        layer_slots=1,
        scale=case.head_size**-0.5,
        sliding_window=case.window,
        attention_chunk_size=case.chunk,
        sinks=_zeros(case.q_heads) if case.sinks else None,
    )


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
    sizes = (case.head_size,) if case.latent else (case.head_size, case.layout.value_size)
    kv = tuple(
        jax.ShapeDtypeStruct((case.sequences * case.new, case.kv_heads, size), case.activation_dtype)
        for size in sizes
    )

    def write(
        pages: jax.Array, kv: tuple[jax.Array, ...], batch: RaggedBatch, table: GroupTable
    ) -> jax.Array:
        place = {"layout": case.layout, "layer_slot": 0, "layer_slots": 1}
        if case.latent:
            return write_latent(pages, kv[0], batch, table, implementation="pallas_tpu", **place)
        return write_kv(pages, kv[0], kv[1], batch, table, implementation="pallas_tpu", **place)

    return Built(write, (pages, kv, batch, table), 0)


def _ints(values: Any) -> Any:
    """Int32, in numpy: a cost tool reads real values."""
    return np.asarray(values, np.int32)


def _zeros(size: int) -> Any:
    """Float32, in numpy: nothing is put on a device before a tool has described one."""
    return np.zeros(size, np.float32)
