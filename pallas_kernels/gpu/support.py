"""Which GPUs and shapes the GPU kernels serve."""

from pallas_kernels.batch import GroupTable
from pallas_kernels.choice import Queries
from pallas_kernels.gpu.device import compute_capability
from pallas_kernels.gpu.plan import TooManyRowsError, plan_decode, plan_prefill
from pallas_kernels.gpu.shared_memory import FEWEST_LANES, TILE_LANES
from pallas_kernels.gpu.token_words import lanes_in, rows_of_plane
from pallas_kernels.layout import LANES, AttentionPageLayout
from pallas_kernels.settings import AttentionSettings

CAPABILITIES = (9, 10)  # Hopper and the Blackwell of data centres: TMA, 227 KiB of shared memory a block
MOST_LANES, MOST_LATENT = 256, 576  # of K and V; of latents
ROWS_OF_TILE = 8
SCALES_OF_COPY = 32  # TMA writes to whole 128 bytes of shared memory


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
    if (reason := _refuses_sizes(layout)) is not None:
        return reason
    for plane, words in enumerate(layout.token_words):
        if rows_of_plane(layout, plane) is None:
            return f"a page of {layout.page_rows * LANES} words is not a whole number of tokens of {words}"
    return None if q is None else _refuses_group(settings, table, q)


def _refuses_sizes(layout: AttentionPageLayout) -> str | None:
    """Why sizes of heads or blocks are not served, or None."""
    most = MOST_LATENT if layout.latent else MOST_LANES
    for name, size in (("head_size", layout.head_size), ("head_size_v", layout.value_size)):
        if size % FEWEST_LANES or size > most:
            return f"{name} {size} is not a multiple of {FEWEST_LANES} up to {most}"
    if layout.latent and layout.value_size % TILE_LANES:
        return f"head_size_v {layout.value_size} of latents is not a multiple of {TILE_LANES}"
    if lanes_in(layout) is None:
        sizes = f"K of {layout.head_size} and V of {layout.value_size}"
        return f"the parts of {sizes} in {layout.dtype} are not multiples of {FEWEST_LANES}"
    rows = SCALES_OF_COPY if layout.is_quantised else ROWS_OF_TILE
    if layout.block_size % rows:
        return f"block_size {layout.block_size} is not a multiple of {rows}"
    return None


def _refuses_group(settings: AttentionSettings, table: GroupTable, q: Queries) -> str | None:
    """Why no tile fits the query heads of a KV head, or None."""
    group = q.shape[1] // settings.layout.num_kv_heads
    try:
        plan_decode(settings, group, table.first_block.shape[0], table, q.dtype)
        plan_prefill(settings, group, q.dtype, compute_capability())
    except TooManyRowsError as reason:
        return str(reason)
    return None
