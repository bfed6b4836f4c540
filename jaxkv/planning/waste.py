"""Where the bytes of a request go: what it needs, and what is lost, by cause."""

from collections import Counter
from dataclasses import dataclass, replace

from jaxkv.planning.plan import CacheGroup, CachePlan
from jaxkv.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    RequestLimits,
    ScratchSpec,
    SlidingWindowSpec,
    cdiv,
)


@dataclass(frozen=True, kw_only=True)
class Waste:
    """Bytes of one decoding request of `num_tokens` tokens. The parts sum to `held_bytes`.

    needed_bytes: what an allocator with no blocks at all would hold.
    padding_layers: layer slots under its blocks that belong to no layer.
    page_padding: the ends of pages that hold nothing, because the page is larger than the layer's content.
    block_tail: tokens of its blocks that it does not need: the end of the last, the start of a window's
      first.
    reserved_states: recurrent states beside the running one, for prefix caching and drafts.
    """

    num_tokens: int
    needed_bytes: int = 0
    padding_layers: int = 0
    page_padding: int = 0
    block_tail: int = 0
    reserved_states: int = 0

    @property
    def lost_bytes(self) -> int:
        """Bytes lost to the layout. States kept on purpose are not among them."""
        return self.padding_layers + self.page_padding + self.block_tail

    @property
    def held_bytes(self) -> int:
        return self.needed_bytes + self.lost_bytes + self.reserved_states

    @property
    def wasted_fraction(self) -> float:
        """Share of the held bytes that the layout loses."""
        return self.lost_bytes / max(self.held_bytes, 1)

    @property
    def wasted_or_reserved_fraction(self) -> float:
        """Share of the held bytes that are not needed, the reserved states included."""
        return (self.held_bytes - self.needed_bytes) / max(self.held_bytes, 1)

    def __mul__(self, count: int) -> "Waste":
        """The waste of `count` layers alike."""
        return Waste(
            num_tokens=self.num_tokens,
            needed_bytes=count * self.needed_bytes,
            padding_layers=count * self.padding_layers,
            page_padding=count * self.page_padding,
            block_tail=count * self.block_tail,
            reserved_states=count * self.reserved_states,
        )

    def __add__(self, other: "Waste") -> "Waste":
        return Waste(
            num_tokens=self.num_tokens,
            needed_bytes=self.needed_bytes + other.needed_bytes,
            padding_layers=self.padding_layers + other.padding_layers,
            page_padding=self.page_padding + other.page_padding,
            block_tail=self.block_tail + other.block_tail,
            reserved_states=self.reserved_states + other.reserved_states,
        )


def waste_by_group(plan: CachePlan, num_tokens: int, *, reserved: bool = True) -> tuple[Waste, ...]:
    """The waste of one request of `num_tokens` tokens (at least 1) in each group of the plan.

    reserved: count the recurrent states beside the running one, with the padding of their pages.
    """
    return tuple(_group_waste(plan, group, max(num_tokens, 1), reserved) for group in plan.groups)


def waste_of(plan: CachePlan, num_tokens: int, *, reserved: bool = True) -> Waste:
    """The waste of one request of `num_tokens` tokens in the whole plan."""
    return sum(waste_by_group(plan, num_tokens, reserved=reserved), start=Waste(num_tokens=num_tokens))


MEAN_SAMPLES = 32
"""Lengths over which `mean_wasted_fraction` is taken, or fewer where a block holds fewer tokens."""


def mean_wasted_fraction(plan: CachePlan, num_tokens: int, truth: CachePlan | None = None) -> float:
    """Share of its bytes that a request of about `num_tokens` tokens loses to the layout.

    The mean over lengths spread evenly over one scheduler block around `num_tokens`, so that the last block
    is full no more often than it is empty; of recurrent states the running one alone is counted.

    truth: a plan that knows what the layers need, where `plan` accounts windows as full attention.
    """
    need = truth or plan
    period = plan.scheduler_block_size
    samples = min(period, MEAN_SAMPLES)
    first = num_tokens - period // 2
    lengths = [max(first + (2 * i + 1) * period // (2 * samples), 1) for i in range(samples)]
    held = [waste_of(plan, length, reserved=False).held_bytes for length in lengths]
    needed = [waste_of(need, length, reserved=False).needed_bytes for length in lengths]
    return sum(1 - n / max(h, 1) for n, h in zip(needed, held, strict=True)) / samples


def _group_waste(plan: CachePlan, group: CacheGroup, num_tokens: int, reserved: bool) -> Waste:
    units = held_blocks(group.spec, num_tokens, plan.limits)
    if isinstance(group.spec, MambaSpec) and not reserved:
        units = 1
    # Layers of one spec lose the same: one stands for all.
    kinds = Counter(group.layer_specs) if group.layer_specs else {group.spec: len(group.layer_names)}
    result = Waste(num_tokens=num_tokens)
    used_slots = 0
    for spec, count in kinds.items():
        num_slots = cdiv(spec.page_size_bytes, plan.page_size_bytes)
        used_slots += count * num_slots
        result += _layer_waste(spec, num_tokens, units, num_slots * plan.page_size_bytes, plan.limits) * count
    empty = group.blocks_per_state * plan.layer_slots - used_slots
    return replace(result, padding_layers=units * empty * plan.page_size_bytes)


def _layer_waste(
    spec: KVCacheSpec, num_tokens: int, units: int, page_bytes: int, limits: RequestLimits
) -> Waste:
    """The waste of one layer that holds `units` pages (recurrent: states) of `page_bytes` each."""
    content = spec.unpadded_page_size_bytes
    padding = units * (page_bytes - content)
    needed = needed_bytes(spec, num_tokens, limits)
    if isinstance(spec, MambaSpec):
        reserved = (units - 1) * content
        return Waste(
            num_tokens=num_tokens, needed_bytes=needed, page_padding=padding, reserved_states=reserved
        )
    return Waste(
        num_tokens=num_tokens,
        needed_bytes=needed,
        page_padding=padding,
        block_tail=units * content - needed,
    )


def needed_bytes(spec: KVCacheSpec, num_tokens: int, limits: RequestLimits) -> int:
    """Bytes that one layer needs for a request of `num_tokens` tokens: of a recurrent state, just one."""
    content = spec.unpadded_page_size_bytes
    if not isinstance(spec, AttentionSpec) or isinstance(spec, ScratchSpec):
        return content
    return cdiv(needed_tokens(spec, num_tokens, limits) * content, spec.block_size)


def needed_tokens(spec: AttentionSpec, num_tokens: int, limits: RequestLimits) -> int:
    """Tokens whose keys and values the step that computes token number `num_tokens` reads or writes."""
    if isinstance(spec, CrossAttentionSpec):
        return limits.max_encoder_len
    return num_tokens - _first_kept(spec, num_tokens)


def held_blocks(spec: KVCacheSpec, num_tokens: int, limits: RequestLimits) -> int:
    """Blocks (recurrent: states) that a request holds while it computes token number `num_tokens`."""
    if not isinstance(spec, AttentionSpec) or isinstance(spec, CrossAttentionSpec | ScratchSpec):
        return spec.max_blocks_per_request(limits)
    return cdiv(num_tokens, spec.block_size) - _first_kept(spec, num_tokens) // spec.block_size


def _first_kept(spec: AttentionSpec, num_tokens: int) -> int:
    """The first token still needed by the step that computes the last of `num_tokens` tokens."""
    if isinstance(spec, SlidingWindowSpec):
        return max(num_tokens - 1 - spec.num_retained_tokens, 0)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return (num_tokens - 1) // spec.attention_chunk_size * spec.attention_chunk_size
    return 0
