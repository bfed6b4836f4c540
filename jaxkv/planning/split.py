"""Policy `split`: small pages, recurrent states spread over several, a searched group size.

The page is the largest page of the attention layers, made equal among them as in policy `unified`. A
recurrent state takes as many blocks of its group as its bytes need. Every group size from one layer to the
largest kind's count is scored, and the best taken, by

    bytes that a request of REFERENCE_LENGTH tokens does not need / bytes it holds
    + GROUP_COST * number of groups

A smaller group size leaves fewer slots empty and makes more groups, each with a block table of its own on
host and device.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxkv.planning.grouping import Bucket, Grouping, buckets_of, cut, padding_notes
from jaxkv.planning.pages import equal_pages
from jaxkv.planning.plan import CacheGroup, PlanConfig
from jaxkv.planning.waste import held_blocks, needed_tokens
from jaxkv.specs import AttentionSpec, KVCacheSpec, MambaSpec, RequestLimits, ScratchSpec, cdiv

REFERENCE_LENGTH = 8192
"""Tokens of the request whose waste is scored, or the maximum length where that is shorter."""

GROUP_COST = 0.001
"""What one group more may cost: 0.1 % of a request's bytes."""


def split_groups(layers: Mapping[str, KVCacheSpec], config: PlanConfig) -> Grouping:
    """The groups of policy `split`. Raises JaxkvError where attention pages cannot be made equal."""
    if not layers:
        return Grouping((), ("no layer keeps a cache",))
    equal = _with_equal_attention_pages(layers)
    buckets = buckets_of(equal)
    page = _page_bytes(list(equal.values()), config.page_alignment_bytes)
    size = best_group_size(buckets, page, config.limits)
    groups = tuple(
        _group(names, buckets[index].spec, page, config.page_alignment_bytes)
        for index, names in cut(buckets, size)
    )
    return Grouping(groups, padding_notes(buckets, size))


def best_group_size(buckets: Sequence[Bucket], page_bytes: int, limits: RequestLimits) -> int:
    """The group size with the lowest score; the largest of equals."""
    largest = max(len(bucket.layer_names) for bucket in buckets)
    return min(range(largest, 0, -1), key=lambda size: group_size_score(buckets, size, page_bytes, limits))


def group_size_score(
    buckets: Sequence[Bucket], group_size: int, page_bytes: int, limits: RequestLimits
) -> float:
    """Share of a request's bytes that it does not need, plus the groups' cost. Lower is better."""
    length = min(REFERENCE_LENGTH, limits.max_model_len)
    held = needed = num_groups = 0
    for bucket in buckets:
        groups = cdiv(len(bucket.layer_names), group_size)
        blocks = held_blocks(bucket.spec, length, limits) * blocks_per_state(bucket.spec, page_bytes)
        held += groups * group_size * blocks * page_bytes
        needed += len(bucket.layer_names) * _needed_bytes(bucket.spec, length, limits)
        num_groups += groups
    return 1 - needed / max(held, 1) + GROUP_COST * num_groups


def blocks_per_state(spec: KVCacheSpec, page_bytes: int) -> int:
    """Blocks that one recurrent state takes; 1 for every other kind."""
    return cdiv(spec.unpadded_page_size_bytes, page_bytes) if isinstance(spec, MambaSpec) else 1


def _with_equal_attention_pages(layers: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    attention = {name: spec for name, spec in layers.items() if not isinstance(spec, MambaSpec)}
    equal = equal_pages(attention)
    return {name: equal.get(name, spec) for name, spec in layers.items()}


def _page_bytes(specs: Sequence[KVCacheSpec], alignment: int) -> int:
    """The attention layers' page; in a model without any, the smallest state. Raised to the alignment."""
    pages = [spec.page_size_bytes for spec in specs if not isinstance(spec, MambaSpec)]
    page = pages[0] if pages else min(spec.page_size_bytes for spec in specs)
    return cdiv(page, alignment) * alignment


def _group(names: tuple[str, ...], spec: KVCacheSpec, page_bytes: int, alignment: int) -> CacheGroup:
    per_state = blocks_per_state(spec, page_bytes)
    if per_state > 1:
        return CacheGroup(
            layer_names=names,
            spec=dataclasses.replace(spec, page_size_padded=None),
            blocks_per_state=per_state,
        )
    return CacheGroup(
        layer_names=names, spec=spec if spec.page_size_bytes == page_bytes else spec.padded_to(page_bytes)
    )


def _needed_bytes(spec: KVCacheSpec, num_tokens: int, limits: RequestLimits) -> int:
    content = spec.unpadded_page_size_bytes
    if not isinstance(spec, AttentionSpec) or isinstance(spec, ScratchSpec):
        return content
    return needed_tokens(spec, num_tokens, limits) * content // spec.block_size
