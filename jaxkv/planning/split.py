"""Policy `split`: small pages, recurrent states spread over several, page and group size searched.

A page is a block of tokens of one attention layer. Other attention layers put as many tokens in it as fit, so
that block sizes divide each other; a recurrent state takes as many pages as its bytes need, and the states of
all its layers follow each other page by page through the blocks of one group, with no slot left empty in
between. `split_search` chooses the page and the group size.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxkv.errors import JaxkvError
from jaxkv.planning.compatibility import one_type
from jaxkv.planning.grouping import Bucket, Grouping, buckets_of, cut, padding_notes
from jaxkv.planning.packing import group_of_type
from jaxkv.planning.plan import CacheGroup, PlanConfig
from jaxkv.planning.promotion import layers_to_account
from jaxkv.planning.split_search import Layout, SearchCase, best_layout, best_side_by_side, is_fixed
from jaxkv.specs import KVCacheSpec, MambaSpec, cdiv

Layers = Mapping[str, KVCacheSpec]


def split_groups(layers: Layers, config: PlanConfig) -> Grouping:
    """The groups of policy `split`. Raises JaxkvError where the hybrid manager cannot be off as asked."""
    layers, notes = layers_to_account(layers, config)
    if not layers:
        return Grouping((), ("no layer keeps a cache",))
    bare = {name: _without_padding(spec) for name, spec in layers.items()}
    case = search_case(bare, config)
    layout = best_layout(case)
    beside = best_side_by_side(case) if one_type(list(bare.values())) else None
    if beside is not None and beside.score < layout.score:
        grown = {name: spec.with_block_size(spec.block_size * beside.multiple) for name, spec in bare.items()}
        return Grouping((group_of_type(grown),), notes)
    return Grouping(groups_of(case, layout, config), notes + _notes(case, layout))


def search_case(layers: Layers, config: PlanConfig) -> SearchCase:
    """What the search needs to know of the layers."""
    buckets = buckets_of(layers)
    return SearchCase(
        growing=tuple(bucket for bucket in buckets if not is_fixed(bucket.spec)),
        fixed=tuple(bucket for bucket in buckets if is_fixed(bucket.spec)),
        alignment=_alignment(layers, config),
        max_growth=config.max_block_growth,
        limits=config.limits,
    )


def groups_of(case: SearchCase, layout: Layout, config: PlanConfig) -> tuple[CacheGroup, ...]:
    """The groups of a layout: attention layers dealt out, all states of one spec in one group."""
    buckets = [
        Bucket(bucket.layer_names, bucket.spec.with_block_size(block).padded_to(layout.page_bytes))
        for bucket, block in zip(case.growing, layout.block_sizes, strict=True)
    ]
    groups = [
        CacheGroup(layer_names=names, spec=buckets[index].spec)
        for index, names in (cut(buckets, layout.group_size) if buckets else [])
    ]
    for bucket in case.fixed:
        pages = cdiv(bucket.spec.unpadded_page_size_bytes, layout.page_bytes)
        spec = bucket.spec
        if isinstance(spec, MambaSpec) and layout.block_sizes and config.prefix_match_unit is None:
            # A state where no other group's block ends could never be part of a hit.
            spec = spec.with_block_size(max(layout.block_sizes))
        groups.append(
            CacheGroup(
                layer_names=bucket.layer_names,
                spec=spec.padded_to(pages * layout.page_bytes),
                blocks_per_state=cdiv(len(bucket.layer_names) * pages, layout.group_size),
            )
        )
    return tuple(groups)


def _without_padding(spec: KVCacheSpec) -> KVCacheSpec:
    return dataclasses.replace(spec, page_size_padded=None)


def _alignment(layers: Layers, config: PlanConfig) -> int:
    """Bytes that a page must be a multiple of: the plan's own alignment, and that of latent caches."""
    alignment = config.page_alignment_bytes
    for spec in layers.values():
        own = getattr(spec, "alignment", None)
        if own is not None and alignment % own:
            if own % alignment:
                raise JaxkvError(
                    f"page_alignment_bytes {alignment} and the alignment {own} of a {spec.kind} layer do not "
                    "divide each other"
                )
            alignment = own
    return alignment


def _notes(case: SearchCase, layout: Layout) -> tuple[str, ...]:
    notes = padding_notes(case.growing, layout.group_size)
    grown: Sequence[tuple[Bucket, int]] = [
        (bucket, block)
        for bucket, block in zip(case.growing, layout.block_sizes, strict=True)
        if block != bucket.spec.block_size
    ]
    for bucket, block in grown:
        notes += (
            f"blocks of the {len(bucket.layer_names)} {bucket.spec.kind} layers grow from "
            f"{bucket.spec.block_size} to {block} tokens to fill the page of {layout.page_bytes} bytes",
        )
    return notes
