"""From a plan to what the model's layers need to find their pages."""

from jaxkv.errors import JaxkvError
from jaxkv.planning.plan import CacheGroup, CachePlan
from jaxkv.specs import AttentionSpec
from models.paged_cache import CacheLayout, LayerPlace
from pallas_kernels import AttentionPageLayout

_ROW_BYTES = 4 * 128


def cache_layout(plan: CachePlan, implementation: str | None = None) -> CacheLayout:
    """Where each layer's pages are, and how they are laid out. JaxkvError for a page that is not whole 4 KiB
    tiles and for a kind of layer that has no page layout yet.
    """
    if plan.page_size_bytes % (8 * _ROW_BYTES):
        raise JaxkvError(f"a page must be a multiple of 4096 bytes on a device, not {plan.page_size_bytes}")
    return CacheLayout(
        layer_places=tuple(
            (name, LayerPlace(location.group, location.slot)) for name, location in plan.locations.items()
        ),
        page_layouts=tuple(_page_layout(group, plan.page_size_bytes) for group in plan.groups),
        layer_slots=plan.layer_slots,
        implementation=implementation,
    )


def _page_layout(group: CacheGroup, page_size_bytes: int) -> AttentionPageLayout:
    spec = group.spec
    if not isinstance(spec, AttentionSpec):
        raise JaxkvError(f"layers of kind {spec.kind!r} cannot be run yet, only attention layers")
    return AttentionPageLayout(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        page_rows=page_size_bytes // _ROW_BYTES,
    )
