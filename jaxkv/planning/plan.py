"""What planning decides before the first request: groups, one page size, how many blocks.

The pool a plan describes is one array of `num_blocks * layer_slots` pages; the page of block `b` in layer
slot `j` is number `b * layer_slots + j`. Block 0 is the null block.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxkv.checks import check_all, check_bool, check_int, check_is
from jaxkv.errors import JaxkvError
from jaxkv.planning.alignment import whole_block_alignment
from jaxkv.specs import KVCacheSpec, RequestLimits


class LayerLocation(NamedTuple):
    """Where one layer's pages are: its group's block table, and the layer slots under each block.

    Page k (of num_slots) of the layer lies in slot (slot + k) % layer_slots of block number
    (slot + k) // layer_slots of those that go together: one block, unless a state is spread over several
    (`CacheGroup.blocks_per_state`).
    """

    group: int
    slot: int
    num_slots: int = 1


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers that share one block table.

    spec: what every layer keeps; where the layers' pages differ in size, that of the first.
    layer_specs: one spec a layer, in order; empty where all equal `spec`.
    layer_names: empty only on a pipeline stage that holds no layer of the group; its block table exists all
      the same.
    blocks_per_state: blocks that together hold one stored state of every layer: more than one only where
      recurrent states are spread over several pages. The layers' pages then follow each other through the
      slots of the first block, the second, and so on.
    is_eagle_group: the group holds layers of a draft model that reads one token ahead.
    """

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    blocks_per_state: int = 1
    is_eagle_group: bool = False
    layer_specs: tuple[KVCacheSpec, ...] = ()

    def __post_init__(self) -> None:
        check_all("layer_names", self.layer_names, str)
        check_is("spec", self.spec, KVCacheSpec)
        check_all("layer_specs", self.layer_specs, KVCacheSpec)
        if self.layer_specs and len(self.layer_specs) != len(self.layer_names):
            raise JaxkvError(
                f"a cache group of {len(self.layer_names)} layers has {len(self.layer_specs)} layer specs"
            )
        check_int("blocks_per_state", self.blocks_per_state, 1)
        check_bool("is_eagle_group", self.is_eagle_group)

    @property
    def block_size(self) -> int:
        """Tokens one block of the group stands for."""
        return self.spec.block_size

    def spec_of(self, index: int) -> KVCacheSpec:
        """The spec of the group's layer number `index`."""
        return self.layer_specs[index] if self.layer_specs else self.spec


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """Everything decided before the first request. Plain data: nothing of it changes while serving.

    policy: the name of the policy that made it.
    page_size_bytes: bytes of one page, the same for every layer slot of every block.
    layer_slots: pages under one block id.
    num_blocks: ids of the pool, the null block included.
    hash_block_size: tokens one prefix hash covers; every cacheable group's block is a whole number of them.
    scheduler_block_size: tokens on whose multiples every group's block ends.
    hits_below_blocks: a hit may end inside a block, on any hash block (`prefix_match_unit` was given).
    max_num_seqs: requests that the engine runs at a time at the most. The pool need not hold so many.
    notes: decisions and warnings worth telling a user, one sentence each.
    """

    policy: str
    groups: tuple[CacheGroup, ...]
    page_size_bytes: int
    layer_slots: int
    num_blocks: int
    limits: RequestLimits
    hash_block_size: int
    scheduler_block_size: int
    hits_below_blocks: bool = False
    max_num_seqs: int = 128
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_is("policy", self.policy, str)
        check_all("groups", self.groups, CacheGroup)
        check_is("limits", self.limits, RequestLimits)
        for name in ("page_size_bytes", "layer_slots"):
            check_int(name, getattr(self, name), 1 if self.groups else 0)
        for name in ("hash_block_size", "scheduler_block_size", "max_num_seqs"):
            check_int(name, getattr(self, name), 1)
        check_int("num_blocks", self.num_blocks, 0)
        check_bool("hits_below_blocks", self.hits_below_blocks)
        if self.num_blocks < 2 and self.groups:
            raise JaxkvError(
                f"a pool needs at least 2 blocks (the null block and one usable), got {self.num_blocks}"
            )

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request the plan is made for."""
        return self.limits.max_model_len

    @property
    def max_in_flight_tokens(self) -> int:
        """Tokens scheduled but not yet settled, over all requests together."""
        return self.limits.max_in_flight_tokens

    @property
    def bytes_per_block(self) -> int:
        return self.layer_slots * self.page_size_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of the array to allocate, the null block included."""
        return self.num_blocks * self.bytes_per_block

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return max(self.num_blocks - 1, 0)

    @property
    def hit_alignment(self) -> int:
        """Tokens of whose multiples hits have their length; also the shortest prefix that can hit.

        A prompt hits at most up to the token before its last, so it needs one token more than that.
        """
        return self.hash_block_size if self.hits_below_blocks else self.whole_block_alignment

    @cached_property
    def whole_block_alignment(self) -> int:
        """The same for hits that end with whole blocks."""
        size = self.limits.decode_context_parallel_size
        return whole_block_alignment(self.groups, self.hash_block_size, size)

    def layer_location(self, name: str) -> LayerLocation:
        """Where the layer's pages are. Raises JaxkvError for a layer that the plan does not hold."""
        try:
            return self.locations[name]
        except KeyError:
            raise JaxkvError(
                f"the plan holds no layer {name!r}; it holds {len(self.locations)} layers: "
                f"{', '.join(list(self.locations)[:4])}..."
            ) from None

    @cached_property
    def locations(self) -> dict[str, LayerLocation]:
        """Every layer's location. A layer's slots follow those of the group's layers before it."""
        found: dict[str, LayerLocation] = {}
        for group_index, group in enumerate(self.groups):
            slot = 0
            for index, name in enumerate(group.layer_names):
                num_slots = slots_of(group, index, self.page_size_bytes)
                found[name] = LayerLocation(group_index, slot, num_slots)
                slot += num_slots
        return found

    @property
    def blocks_per_request(self) -> tuple[int, ...]:
        """The most blocks one request holds at a time, by group, with all tokens in flight its own."""
        return blocks_per_request(self.groups, self.limits)

    @property
    def concurrency(self) -> float:
        """Requests of the maximum length that fit even if each has all tokens in flight to itself."""
        return self.usable_blocks / max(sum(self.blocks_per_request), 1)


def blocks_per_request(groups: Iterable[CacheGroup], limits: RequestLimits) -> tuple[int, ...]:
    """The most blocks one request holds at a time within `limits`, by group."""
    return tuple(group.spec.max_blocks_per_request(limits) * group.blocks_per_state for group in groups)


def slots_of(group: CacheGroup, index: int, page_size_bytes: int) -> int:
    """Pages that layer number `index` of the group takes: of each block, or of each state that is spread.

    One, but where the layers of a plan have pages of different sizes (then the plan's page is a common
    divisor), or a state is larger than a page, it is that many pages in a row.
    """
    return -(-group.spec_of(index).page_size_bytes // page_size_bytes)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What a plan is made for, apart from the layers and the memory.

    policy: how layers become groups: "split" or "unified".
    max_model_len: tokens of the longest request; the upper limit where `auto_fit_max_model_len` is set.
    max_num_batched_tokens, batches_in_flight: their product is the number of tokens in flight.
    num_lookahead_tokens: tokens a draft model reads ahead.
    use_eagle: groups with layers of a draft model read one token ahead, and drop their last block of a hit.
    prefix_match_unit: tokens a prefix hash covers, where finer than the greatest common divisor of the
      blocks.
    page_alignment_bytes: every page is raised to a multiple of this. 4096 bytes is one TPU tile of any dtype;
      1 gives the byte counts of vLLM.
    disable_hybrid_kv_cache_manager: account window and chunked layers as full attention, all in one group.
    pack_mixed_pages: lay pages of different sizes side by side in a block rather than make them equal (policy
      `unified`; vLLM does so where its layout has the block outermost).
    align_hybrid_blocks: first let the attention layers' block grow until its page covers the largest
      recurrent state (policy `unified`, models read from a config file).
    max_block_growth: how many times larger than asked for an attention block may become so that its page
      fills whole tiles (policy `split`). Less keeps hits fine where pages are small.
    num_gpu_blocks_override: the number of blocks, whatever the memory would give.
    """

    policy: str = "split"
    max_model_len: int = 8192
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    batches_in_flight: int = 1
    num_lookahead_tokens: int = 0
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0
    max_encoder_len: int = 0
    decode_context_parallel_size: int = 1
    enable_prefix_caching: bool = True
    use_eagle: bool = False
    prefix_match_unit: int | None = None
    page_alignment_bytes: int = 4096
    disable_hybrid_kv_cache_manager: bool = False
    pack_mixed_pages: bool = False
    align_hybrid_blocks: bool = False
    auto_fit_max_model_len: bool = False
    max_block_growth: int = 16
    num_gpu_blocks_override: int | None = None

    def __post_init__(self) -> None:
        check_is("policy", self.policy, str)
        at_least = {
            "max_model_len": 1,
            "max_num_batched_tokens": 1,
            "max_num_seqs": 1,
            "batches_in_flight": 1,
            "num_lookahead_tokens": 0,
            "num_speculative_blocks": 0,
            "num_prefill_checkpoint_blocks": 0,
            "max_encoder_len": 0,
            "decode_context_parallel_size": 1,
            "prefix_match_unit": 1,
            "page_alignment_bytes": 1,
            "max_block_growth": 1,
            "num_gpu_blocks_override": 2,
        }
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is None and name in ("prefix_match_unit", "num_gpu_blocks_override"):
                continue
            check_int(name, value, least)
        for name in (
            "enable_prefix_caching",
            "use_eagle",
            "disable_hybrid_kv_cache_manager",
            "pack_mixed_pages",
            "align_hybrid_blocks",
            "auto_fit_max_model_len",
        ):
            check_bool(name, getattr(self, name))

    @property
    def limits(self) -> RequestLimits:
        return RequestLimits(
            max_model_len=self.max_model_len,
            max_in_flight_tokens=self.max_num_batched_tokens * self.batches_in_flight,
            num_lookahead_tokens=self.num_lookahead_tokens,
            num_speculative_blocks=self.num_speculative_blocks,
            num_prefill_checkpoint_blocks=self.num_prefill_checkpoint_blocks,
            max_encoder_len=self.max_encoder_len,
            decode_context_parallel_size=self.decode_context_parallel_size,
        )
