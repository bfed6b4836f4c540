"""Policy `unified`: the published way to group the layers of a hybrid model.

Its partition of layers, block sizes, page sizes and number of blocks equal vLLM 0.33's for the same layers.
It tries, in this order: the hybrid manager switched off; no cache at all; one spec; one type with pages of
different sizes; pages side by side (where asked for); equal pages and groups of equal size; and, where pages
cannot be made equal, windows accounted as full attention.
"""

from collections.abc import Mapping

from jaxkv.errors import JaxkvError
from jaxkv.planning.compatibility import merged, one_type
from jaxkv.planning.grouping import Grouping, buckets_of, cut, group_size_rule, padding_notes
from jaxkv.planning.packing import group_of_type, packed_groups
from jaxkv.planning.pages import PagesDiffer, equal_pages
from jaxkv.planning.plan import CacheGroup, PlanConfig
from jaxkv.planning.promotion import layers_to_account, promoted
from jaxkv.specs import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MLASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

Layers = Mapping[str, KVCacheSpec]


def unified_groups(layers: Layers, config: PlanConfig) -> Grouping:
    """The groups of policy `unified`. Raises JaxkvError where no step of the chain fits the layers."""
    layers, notes = layers_to_account(layers, config)
    if not layers:
        return Grouping((), ("no layer keeps a cache",))
    specs = list(layers.values())
    if merged(specs) is not None or one_type(specs):
        return Grouping((group_of_type(layers),), notes)
    if config.pack_mixed_pages and len({spec.page_size_bytes for spec in specs}) > 1:
        return Grouping(packed_groups(layers), notes)
    try:
        equal = equal_pages(layers)
    except PagesDiffer as reason:
        return _full_allocation(layers, reason)
    return _equal_groups(equal, notes)


def _equal_groups(layers: Layers, notes: tuple[str, ...]) -> Grouping:
    buckets = buckets_of(layers)
    size = group_size_rule([len(bucket.layer_names) for bucket in buckets])
    groups = tuple(
        CacheGroup(layer_names=names, spec=buckets[index].spec) for index, names in cut(buckets, size)
    )
    return Grouping(groups, notes + padding_notes(buckets, size))


def _full_allocation(layers: Layers, reason: PagesDiffer) -> Grouping:
    """One group that keeps every token: for MLA beside plain windows whose pages cannot be made equal."""
    specs = layers.values()
    plain_window = any(
        isinstance(spec, SlidingWindowSpec) and not isinstance(spec, SlidingWindowMLASpec) for spec in specs
    )
    local_latent = any(isinstance(spec, SlidingWindowMLASpec | ChunkedLocalAttentionSpec) for spec in specs)
    if local_latent or not plain_window or not any(isinstance(spec, MLASpec) for spec in specs):
        raise reason
    try:
        as_one = promoted(layers)
    except JaxkvError:
        raise reason from None
    if not one_type(list(as_one.values())):
        raise reason
    note = "pages cannot be made equal in size: window layers keep every token"
    return Grouping((group_of_type(as_one),), (note,))
