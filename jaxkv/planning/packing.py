"""Pages of different sizes side by side in one block.

Layers of one type (same blocks at all times) form a bucket. A bucket whose page sizes all occur equally often
is a pattern, one layer of each size, repeated; it is cut into groups of whole repeats. The number of repeats
is chosen so that rounding up wastes least. Recurrent layers are cut so that they fit the block the others
need anyway. The rules are those of vLLM's block-outermost layout.
"""

from collections.abc import Mapping
from typing import NamedTuple

from jaxkv.planning.compatibility import merged, one_type
from jaxkv.planning.plan import CacheGroup
from jaxkv.specs import KVCacheSpec, MambaSpec, ScratchSpec, SlidingWindowSpec, cdiv


class _TypeBucket(NamedTuple):
    layers: dict[str, KVCacheSpec]
    by_page: dict[int, list[str]]

    @property
    def repeats(self) -> int:
        return max(len(names) for names in self.by_page.values())

    @property
    def is_pattern(self) -> bool:
        return len({len(names) for names in self.by_page.values()}) == 1

    @property
    def first_spec(self) -> KVCacheSpec:
        return next(iter(self.layers.values()))

    def widest_group_bytes(self, num_groups: int) -> int:
        """Bytes under one block id of the largest of `num_groups` groups."""
        return sum(cdiv(len(names), num_groups) * page for page, names in self.by_page.items())

    def dealt(self, num_groups: int) -> list[list[str]]:
        """The layers' names dealt out to the groups: whole repeats of a pattern, else layer by layer.

        So are a pattern's where there are more groups than repeats: no group stays empty.
        """
        if not self.is_pattern or num_groups > self.repeats:
            return [list(self.layers)[start::num_groups] for start in range(num_groups)]
        repeats = list(zip(*self.by_page.values(), strict=True))
        return [[name for repeat in repeats[i::num_groups] for name in repeat] for i in range(num_groups)]


def packed_groups(layers: Mapping[str, KVCacheSpec]) -> tuple[CacheGroup, ...]:
    """Groups whose layers' pages may differ in size. A block is as large as the widest group."""
    buckets = _type_buckets(layers)
    patterns = [bucket for bucket in buckets if bucket.is_pattern]
    # A pattern of several sizes stays whole: the largest such bucket is the least that a group may hold.
    floor = max((bucket.repeats for bucket in patterns if len(bucket.by_page) > 1), default=0)
    repeats = least_padding_size([bucket.repeats for bucket in patterns], floor) if floor else None

    def pattern_groups(bucket: _TypeBucket) -> int:
        return cdiv(bucket.repeats, repeats) if repeats and bucket.is_pattern else 1

    def is_divisible(bucket: _TypeBucket) -> bool:
        """Whether the bucket may be cut down to one layer a group to fit a block."""
        kinds = (MambaSpec, ScratchSpec) if repeats else (MambaSpec, ScratchSpec, SlidingWindowSpec)
        return isinstance(bucket.first_spec, kinds)

    block_bytes = max(
        bucket.widest_group_bytes(len(bucket.layers) if is_divisible(bucket) else pattern_groups(bucket))
        for bucket in buckets
    )
    groups = []
    for bucket in buckets:
        num_groups = pattern_groups(bucket)
        if is_divisible(bucket):
            fitting = max(block_bytes // bucket.first_spec.page_size_bytes, 1)
            num_groups = max(num_groups, cdiv(len(bucket.layers), fitting))
        if num_groups == 1:
            groups.append(group_of_type(bucket.layers))
            continue
        groups += [
            group_of_type({name: bucket.layers[name] for name in names}) for names in bucket.dealt(num_groups)
        ]
    return tuple(groups)


def group_of_type(layers: Mapping[str, KVCacheSpec]) -> CacheGroup:
    """One group of layers of one type; their specs are kept one by one where they differ."""
    specs = tuple(layers.values())
    spec = merged(specs)
    if spec is not None:
        return CacheGroup(layer_names=tuple(layers), spec=spec)
    return CacheGroup(layer_names=tuple(layers), spec=specs[0], layer_specs=specs)


def least_padding_size(counts: list[int], at_least: int) -> int:
    """The size for which rounding every count up to a multiple of it adds least; the largest of equals.

    Sizes from `at_least` to the largest count are tried.
    """
    sizes = range(max(1, at_least), max(counts) + 1)
    if not sizes:
        return max(1, at_least)
    return min(sizes, key=lambda d: (sum(-count % d for count in counts), -d))


def _type_buckets(layers: Mapping[str, KVCacheSpec]) -> list[_TypeBucket]:
    buckets: list[_TypeBucket] = []
    for name, spec in layers.items():
        home = next((b for b in buckets if one_type([*b.layers.values(), spec])), None)
        if home is None:
            home = _TypeBucket({}, {})
            buckets.append(home)
        home.layers[name] = spec
        home.by_page.setdefault(spec.page_size_bytes, []).append(name)
    return buckets
