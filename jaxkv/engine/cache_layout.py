"""From a plan to what the model's layers need to find their pages."""

from jaxkv.errors import JaxkvError
from jaxkv.planning.plan import CachePlan, LayerLocation
from jaxkv.specs import AttentionSpec, KVCacheSpec, MambaSpec
from models.paged_cache import CacheLayout, LayerPlace
from pallas_kernels import AttentionPageLayout
from pallas_kernels.recurrent import StateLayout

_ROW_BYTES = 4 * 128
_ATTENTION_KINDS = ("full", "sliding_window")


def cache_layout(plan: CachePlan, implementation: str | None = None) -> CacheLayout:
    """Where each layer's pages are, and how they are laid out. JaxkvError for a page that is not whole 4 KiB
    tiles, and for a layer that has no page layout.
    """
    if plan.page_size_bytes % (8 * _ROW_BYTES):
        raise JaxkvError(f"a page must be a multiple of 4096 bytes on a device, not {plan.page_size_bytes}")
    return CacheLayout(
        layer_places=tuple((name, _place(plan, name, location)) for name, location in plan.locations.items()),
        layer_slots=plan.layer_slots,
        implementation=implementation,
    )


def _place(plan: CachePlan, name: str, location: LayerLocation) -> LayerPlace:
    group = plan.groups[location.group]
    layout = _layout(name, group.spec_of(group.layer_names.index(name)), plan.page_size_bytes)
    if isinstance(layout, AttentionPageLayout) and location.num_slots != 1:
        raise JaxkvError(
            f"layer {name!r} keeps {location.num_slots} pages a block; attention layers can be run with one"
        )
    return LayerPlace(location.group, location.slot, layout)


def _layout(name: str, spec: KVCacheSpec, page_size_bytes: int) -> AttentionPageLayout | StateLayout:
    page_rows = page_size_bytes // _ROW_BYTES
    if isinstance(spec, MambaSpec):
        return StateLayout(shapes=spec.shapes, dtypes=spec.dtypes, page_rows=page_rows)
    if isinstance(spec, AttentionSpec) and spec.kind in _ATTENTION_KINDS:
        try:
            return AttentionPageLayout(
                block_size=spec.block_size,
                num_kv_heads=spec.num_kv_heads,
                head_size=spec.head_size,
                head_size_v=spec.head_size_v,
                dtype=spec.dtype,
                page_rows=page_rows,
            )
        except ValueError as error:
            raise JaxkvError(f"layer {name!r} cannot be kept in {spec.dtype}: {error}") from error
    raise JaxkvError(f"layer {name!r} is of kind {spec.kind!r}, which cannot be run")
