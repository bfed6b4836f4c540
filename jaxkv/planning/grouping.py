"""Cutting the layers of each spec into groups of equal size."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxkv.planning.compatibility import merged
from jaxkv.planning.plan import CacheGroup
from jaxkv.specs import KVCacheSpec, cdiv


class Grouping(NamedTuple):
    """Groups, and what a user should know of how they came about."""

    groups: tuple[CacheGroup, ...]
    notes: tuple[str, ...] = ()


class Bucket(NamedTuple):
    """All layers of one spec, in the model's order."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec


def buckets_of(layers: Mapping[str, KVCacheSpec]) -> list[Bucket]:
    """The layers sorted by spec, in order of first appearance; specs that merge share a bucket."""
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layers.items():
        by_spec.setdefault(spec, []).append(name)
    merging: list[tuple[list[str], list[KVCacheSpec]]] = []
    for spec, names in by_spec.items():
        for bucket_names, bucket_specs in merging:
            if merged([*bucket_specs, spec]) is not None:
                bucket_names.extend(names)
                bucket_specs.append(spec)
                break
        else:
            merging.append((list(names), [spec]))
    return [Bucket(tuple(names), merged(specs) or specs[0]) for names, specs in merging]


def group_size_rule(layer_counts: Sequence[int]) -> int:
    """Layers in a group by vLLM's rule: the smallest kind's count, or the largest where they are close.

    Close means below one and a half times: 12 window and 13 full layers make two groups of 13, not three of
    12.
    """
    fewest, most = min(layer_counts), max(layer_counts)
    return most if most < 1.5 * fewest else fewest


def cut(buckets: Sequence[Bucket], group_size: int) -> list[tuple[int, tuple[str, ...]]]:
    """(bucket number, layer names) of every group: each bucket dealt out over as few groups as it needs.

    Dealing (first layer to the first group, second to the second) rather than slicing gives every pipeline
    stage layers of every group.
    """
    groups = []
    for index, bucket in enumerate(buckets):
        num_groups = cdiv(len(bucket.layer_names), group_size)
        groups += [(index, bucket.layer_names[i::num_groups]) for i in range(num_groups)]
    return groups


def padding_notes(buckets: Sequence[Bucket], group_size: int) -> tuple[str, ...]:
    """One sentence for every kind whose groups have slots without a layer."""
    notes = []
    for bucket in buckets:
        count = len(bucket.layer_names)
        padding = cdiv(count, group_size) * group_size - count
        if padding:
            notes.append(
                f"{count} {bucket.spec.kind} layers in groups of {group_size}: {padding} layer slots stay "
                f"empty, {100 * padding / count:.1f} % more than these layers need"
            )
    return tuple(notes)
