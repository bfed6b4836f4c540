"""Which GPUs and shapes the GPU kernels serve."""

from pallas_kernels.batch import GroupTable
from pallas_kernels.choice import Queries
from pallas_kernels.gpu.device import compute_capability
from pallas_kernels.gpu.plan import TooManyRowsError, plan_decode, plan_prefill
from pallas_kernels.gpu.shared_memory import TILE_LANES
from pallas_kernels.layout import LANES
from pallas_kernels.settings import AttentionSettings

CAPABILITIES = (9, 10)  # Hopper and the Blackwell of data centres: TMA, 227 KiB of shared memory a block
MOST_LANES = 256
ROWS_OF_TILE = 8
_PAGE_DTYPES = ("bfloat16", "float32")


def refuses_gpu() -> str | None:
    """Why the kernels do not serve the GPU that is traced for, or None; none at all is no reason."""
    capability = compute_capability()
    if capability is None or int(capability) in CAPABILITIES:
        return None
    return f"compute capability {capability} is none of {', '.join(map(str, CAPABILITIES))}"


def refuses_on_gpu(settings: AttentionSettings, table: GroupTable, q: Queries | None = None) -> str | None:
    """Why the GPU kernels do not serve this machine's GPU, a layer of these settings, or queries, or None."""
    if (reason := refuses_gpu()) is not None:
        return reason
    layout = settings.layout
    if layout.dtype not in _PAGE_DTYPES:
        return f"pages of {layout.dtype} are not among {', '.join(_PAGE_DTYPES)}"
    if layout.latent:
        return "the pages hold latents"
    if layout.value_size != layout.head_size:
        return f"V of {layout.value_size} differs from K of {layout.head_size}"
    if layout.head_size % TILE_LANES or layout.head_size > MOST_LANES:
        return f"head_size {layout.head_size} is not a multiple of {TILE_LANES} up to {MOST_LANES}"
    if layout.block_size % ROWS_OF_TILE:
        return f"block_size {layout.block_size} is not a multiple of {ROWS_OF_TILE}"
    if layout.page_rows * LANES % layout.head_size:
        words = layout.page_rows * LANES
        return f"a page of {words} words is not a whole number of heads of {layout.head_size}"
    return None if q is None else _refuses_group(settings, table, q)


def _refuses_group(settings: AttentionSettings, table: GroupTable, q: Queries) -> str | None:
    """Why no tile fits the query heads of a KV head, or None."""
    group = q.shape[1] // settings.layout.num_kv_heads
    try:
        plan_decode(settings, group, table.first_block.shape[0], table, q.dtype)
        plan_prefill(settings, group, q.dtype, compute_capability())
    except TooManyRowsError as reason:
        return str(reason)
    return None
