"""The search of policy `split`: which page and which group size lose least.

Candidates. A page is a block of one attention layer, times 1, 2, 4, 8 or 16, raised to the alignment; it
holds at least one block of every attention layer. In a page, kinds with fewer bytes a token get more tokens:
the most that fit, as a whole multiple of the block of the kind before (by bytes a token, largest first), so
that block sizes divide each other. The group size is any number of layers up to the largest kind's count.

Cost. The mean, over requests of REFERENCE_LENGTHS tokens, of the share of the bytes held that the layout
loses (padding and unused ends of blocks), plus GROUP_COST for every group. The lengths are one past a
multiple of every block, where the last block is emptiest: larger blocks pay for what they hold too much.
Plans with more than MAX_GROUPS groups are taken only where there is no other.

Why groups cost little: groups of equal specs are served by one manager, so the host's work hardly grows with
their number; but each has a block table of its own on the device.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxkv.planning.grouping import Bucket
from jaxkv.planning.waste import held_blocks, needed_bytes
from jaxkv.specs import AttentionSpec, KVCacheSpec, RequestLimits, ScratchSpec, cdiv

REFERENCE_LENGTHS = (1025, 8193)
"""Tokens of the requests whose loss is scored, or the maximum length where that is shorter."""

GROUP_COST = 0.0007
"""What one group more may cost: 0.07 % of a request's bytes."""

MAX_GROUPS = 40
"""More groups than this are avoided: as many block tables would go to the device in every step."""

PAGE_MULTIPLES = (1, 2, 4, 8, 16)
"""How much larger than asked for a block may become to fill whole tiles."""


class SearchCase(NamedTuple):
    """growing: layers with a cache a token, by spec; fixed: layers with a state or ring of fixed size.

    alignment: bytes that a page must be a multiple of. max_growth: the largest of PAGE_MULTIPLES to try.
    """

    growing: tuple[Bucket, ...]
    fixed: tuple[Bucket, ...]
    alignment: int
    limits: RequestLimits
    max_growth: int = PAGE_MULTIPLES[-1]

    @property
    def multiples(self) -> list[int]:
        """How many times larger blocks may be."""
        return [multiple for multiple in PAGE_MULTIPLES if multiple <= self.max_growth]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The reference lengths, within the maximum."""
        return tuple(sorted({min(length, self.limits.max_model_len) for length in REFERENCE_LENGTHS}))


class Layout(NamedTuple):
    """block_sizes: tokens, one for each growing bucket. group_size: layer slots under a block id."""

    page_bytes: int
    block_sizes: tuple[int, ...]
    group_size: int
    num_groups: int
    score: float


class SideBySide(NamedTuple):
    """One group whose layers' pages differ in size. multiple: of every layer's block size."""

    multiple: int
    score: float


def is_fixed(spec: KVCacheSpec) -> bool:
    """Whether a layer of this spec keeps the same bytes however long the sequence is."""
    return not isinstance(spec, AttentionSpec) or isinstance(spec, ScratchSpec)


def best_layout(case: SearchCase) -> Layout:
    """The candidate of lowest cost; of equals the one of finest blocks, then of fewest groups."""

    def rank(layout: Layout) -> tuple[bool, float, int, int, int]:
        finest = max(layout.block_sizes, default=0)
        too_many = layout.num_groups > MAX_GROUPS
        return too_many, round(layout.score, 12), finest, layout.num_groups, -layout.group_size

    return min(layouts(case), key=rank)


def layouts(case: SearchCase) -> Iterator[Layout]:
    """Every candidate with its cost."""
    for page in pages(case):
        blocks = block_sizes(case.growing, page)
        by_length = [_Demand.of(case, page, blocks, length) for length in case.lengths]
        for size in group_sizes(case):
            groups = sum(cdiv(len(bucket.layer_names), size) for bucket in case.growing) + len(case.fixed)
            lost = sum(demand.lost_share(size, page) for demand in by_length) / len(by_length)
            yield Layout(page, blocks, size, groups, lost + GROUP_COST * groups)


def pages(case: SearchCase) -> list[int]:
    """Bytes of the pages to try, ascending."""
    buckets = case.growing or case.fixed
    sizes = {bucket.spec.unpadded_page_size_bytes for bucket in buckets}
    least = max(sizes) if case.growing else 1
    multiples = case.multiples if case.growing else [1]
    raised = {cdiv(size * m, case.alignment) * case.alignment for size in sizes for m in multiples}
    return sorted(page for page in raised if page >= least)


def group_sizes(case: SearchCase) -> list[int]:
    """Group sizes to try. Layers are dealt out evenly,
    so sizes that the widest group would not fill are left out.
    """
    counts = [len(bucket.layer_names) for bucket in case.growing]
    if not counts:
        return [len(bucket.layer_names) for bucket in case.fixed]
    return sorted(
        {max(cdiv(count, cdiv(count, size)) for count in counts) for size in range(1, max(counts) + 1)}
    )


def block_sizes(buckets: Sequence[Bucket], page_bytes: int) -> tuple[int, ...]:
    """Tokens that each bucket's layers put in a page; they divide each other where the own blocks do."""
    order = sorted(range(len(buckets)), key=lambda i: -_bytes_per_token(buckets[i].spec))
    chosen = [0] * len(buckets)
    step = 1
    for index in order:
        spec = buckets[index].spec
        step = math.lcm(step, spec.block_size)
        fitting = page_bytes * spec.block_size // spec.unpadded_page_size_bytes
        own_steps = fitting // spec.block_size * spec.block_size
        chosen[index] = step = fitting // step * step or own_steps
    return tuple(chosen)


def best_side_by_side(case: SearchCase) -> SideBySide | None:
    """All layers, which must be of one type, in one group with pages of their own sizes."""
    if case.fixed or len({bucket.spec.page_size_bytes for bucket in case.growing}) == 1:
        return None
    candidates = []
    for multiple in case.multiples:
        lost = 0.0
        for length in case.lengths:
            held = needed = 0
            for bucket in case.growing:
                spec = bucket.spec.with_block_size(bucket.spec.block_size * multiple)
                page = cdiv(spec.unpadded_page_size_bytes, case.alignment) * case.alignment
                held += len(bucket.layer_names) * page * held_blocks(spec, length, case.limits)
                needed += len(bucket.layer_names) * needed_bytes(spec, length, case.limits)
            lost += 1 - needed / max(held, 1)
        candidates.append(SideBySide(multiple, lost / len(case.lengths) + GROUP_COST))
    return min(candidates, key=lambda candidate: candidate.score)


class _Demand(NamedTuple):
    """What one request needs of each bucket, for one page and its block sizes.

    growing: (layers, blocks) a bucket. fixed: (states or rings, pages of all layers' states together).
    kept_bytes: what a byte-exact allocator would hold, reserved states included.
    """

    growing: list[tuple[int, int]]
    fixed: list[tuple[int, int]]
    kept_bytes: int

    @classmethod
    def of(cls, case: SearchCase, page_bytes: int, blocks: Sequence[int], length: int) -> "_Demand":
        growing, fixed, kept = [], [], 0
        for bucket, block in zip(case.growing, blocks, strict=True):
            spec = bucket.spec.with_block_size(block)
            growing.append((len(bucket.layer_names), held_blocks(spec, length, case.limits)))
            kept += len(bucket.layer_names) * needed_bytes(spec, length, case.limits)
        for bucket in case.fixed:
            states = held_blocks(bucket.spec, length, case.limits)
            content = bucket.spec.unpadded_page_size_bytes
            fixed.append((states, len(bucket.layer_names) * cdiv(content, page_bytes)))
            kept += len(bucket.layer_names) * states * content
        return cls(growing, fixed, kept)

    def lost_share(self, group_size: int, page_bytes: int) -> float:
        """Bytes lost / bytes held in groups of this size."""
        ids = sum(cdiv(layers, group_size) * blocks for layers, blocks in self.growing)
        ids += sum(states * cdiv(pages, group_size) for states, pages in self.fixed)
        return 1 - self.kept_bytes / max(ids * group_size * page_bytes, 1)


def _bytes_per_token(spec: KVCacheSpec) -> float:
    return spec.unpadded_page_size_bytes / spec.block_size
