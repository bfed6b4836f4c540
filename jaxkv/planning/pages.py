"""Making the pages of all layers equal in size."""

from collections.abc import Mapping

from jaxkv.errors import JaxkvError
from jaxkv.planning.plan import CacheGroup
from jaxkv.specs import AttentionSpec, KVCacheSpec, MambaSpec, MLASpec, cdiv


class PagesDiffer(JaxkvError):
    """The pages of these layers cannot be made equal."""


def equal_pages(layers: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """All layers raised to the largest page.

    A page that divides it gets a larger block; a recurrent state or another attention page is padded. MLA
    rows are addressed across pages and take no padding: PagesDiffer is raised.
    """
    largest = max((spec.page_size_bytes for spec in layers.values()), default=0)
    return {name: _raised(name, spec, largest) for name, spec in layers.items()}


def _raised(name: str, spec: KVCacheSpec, page_size: int) -> KVCacheSpec:
    own = spec.page_size_bytes
    if own == page_size:
        return spec
    if isinstance(spec, MambaSpec):
        return spec.padded_to(page_size)
    if page_size % own == 0 and spec.page_size_padded is None:
        return spec.with_block_size(spec.block_size * (page_size // own))
    if isinstance(spec, AttentionSpec) and not isinstance(spec, MLASpec):
        return spec.padded_to(page_size)
    raise PagesDiffer(
        f"layer {name}: its page of {own} bytes does not divide the largest page of {page_size} bytes, and a "
        f"page of kind {spec.kind} takes no padding; choose block sizes whose pages divide each other"
    )


def aligned(spec: KVCacheSpec, alignment: int) -> KVCacheSpec:
    """The spec with its page raised to a multiple of `alignment` bytes."""
    rounded = cdiv(spec.page_size_bytes, alignment) * alignment
    return spec if rounded == spec.page_size_bytes else spec.padded_to(rounded)


def aligned_group(group: CacheGroup, alignment: int) -> CacheGroup:
    """The group with every layer's page (all pages of a spread state) raised to a multiple of `alignment`."""
    return CacheGroup(
        layer_names=group.layer_names,
        spec=aligned(group.spec, alignment),
        blocks_per_state=group.blocks_per_state,
        is_eagle_group=group.is_eagle_group,
        layer_specs=tuple(aligned(spec, alignment) for spec in group.layer_specs),
    )
