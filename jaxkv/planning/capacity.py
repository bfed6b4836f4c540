"""How many blocks the memory gives, whether a request fits, the longest that does, and how many at once."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from jaxkv.errors import JaxkvError
from jaxkv.memory_size import format_bytes
from jaxkv.planning.alignment import effective_block_size
from jaxkv.planning.plan import CacheGroup, CachePlan, PlanConfig, blocks_per_request
from jaxkv.specs import AttentionSpec, KVCacheSpec, MambaSpec, RequestLimits


class BlockSizes(NamedTuple):
    """Tokens of one prefix hash, and tokens on whose multiples all groups' blocks end."""

    hash_block_size: int
    scheduler_block_size: int


def resolve_block_sizes(groups: Sequence[CacheGroup], config: PlanConfig) -> BlockSizes:
    """The hash block and the scheduler block of these groups.

    The hash block is the greatest common divisor of the cacheable groups' blocks, or `prefix_match_unit`; the
    scheduler block is their least common multiple.

    Without prefix caching, and beside recurrent layers that keep no states to hit (mode "none"), both are the
    latter. Context parallelism multiplies the blocks of the groups that it spreads. Raises JaxkvError for a
    `prefix_match_unit` that does not divide every block, or does not end on stored states.
    """
    cacheable = [group for group in groups if group.spec.prefix_cacheable] or list(groups)
    if not cacheable:
        return BlockSizes(1, 1)
    sizes = [effective_block_size(group.spec, config.decode_context_parallel_size) for group in cacheable]
    scheduler = math.lcm(*sizes)
    keeps_no_states = any(
        isinstance(group.spec, MambaSpec) and group.spec.mamba_cache_mode != "align" for group in groups
    )
    if not config.enable_prefix_caching or keeps_no_states:
        return BlockSizes(scheduler, scheduler)
    if config.prefix_match_unit is None:
        return BlockSizes(math.gcd(*sizes), scheduler)
    unit = config.prefix_match_unit
    for group, size in zip(cacheable, sizes, strict=True):
        if size % unit:
            raise JaxkvError(
                f"prefix_match_unit {unit} must divide the block of every group; the group of layer "
                f"{group.layer_names[0]} ({group.spec.kind}) has blocks of {size} tokens"
            )
        if isinstance(group.spec, AttentionSpec) and unit % group.spec.tokens_per_state and unit > 1:
            raise JaxkvError(
                f"prefix_match_unit {unit} must be a multiple of the {group.spec.tokens_per_state} tokens "
                f"that one state of layer {group.layer_names[0]} covers"
            )
    return BlockSizes(unit, scheduler)


def blocks_in(memory_bytes: int, bytes_per_block: int, config: PlanConfig) -> int:
    """Blocks that the memory holds, the null block included. Raises JaxkvError for fewer than two."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    if isinstance(memory_bytes, bool) or not isinstance(memory_bytes, int) or memory_bytes < 1:
        raise JaxkvError(f"the cache's memory must be at least 1 byte, got {memory_bytes!r}")
    num_blocks = memory_bytes // bytes_per_block
    if num_blocks < 2:
        raise JaxkvError(
            f"a memory of {format_bytes(memory_bytes)} holds no usable block: a block takes "
            f"{format_bytes(bytes_per_block)} and the null block is one, so the least is "
            f"{format_bytes(2 * bytes_per_block)}; raise the memory or lower block_size"
        )
    return num_blocks


def fitting_limits(
    groups: Sequence[CacheGroup], num_blocks: int, bytes_per_block: int, config: PlanConfig
) -> RequestLimits:
    """The limits of requests such that an empty pool can run one of the maximum length.

    Where `auto_fit_max_model_len` is set the maximum is lowered to the longest that fits; else, or where not
    even one token fits, JaxkvError names the shortfall.
    """
    limits = config.limits
    usable = num_blocks - 1
    needed = sum(blocks_per_request(groups, limits))
    if needed <= usable:
        return limits
    longest = longest_fitting(groups, limits, usable)
    if config.auto_fit_max_model_len and longest:
        return dataclasses.replace(limits, max_model_len=longest)
    shortfall = (needed - usable) * bytes_per_block
    advice = f"lower max_model_len to {longest} or " if longest else ""
    if not longest and limits.max_in_flight_tokens > 1:
        advice = "lower max_num_batched_tokens or "
    raise JaxkvError(
        f"one request of max_model_len {limits.max_model_len} needs {needed} blocks of "
        f"{format_bytes(bytes_per_block)}, the pool has {usable} usable: {format_bytes(shortfall)} short; "
        f"{advice}raise the memory to {format_bytes((needed + 1) * bytes_per_block)}"
    )


def longest_fitting(groups: Sequence[CacheGroup], limits: RequestLimits, usable_blocks: int) -> int:
    """Tokens of the longest request, up to the limits' maximum, that fits `usable_blocks`; 0: none does."""

    def fits(length: int) -> bool:
        return (
            sum(blocks_per_request(groups, dataclasses.replace(limits, max_model_len=length)))
            <= usable_blocks
        )

    longest, too_long = 0, limits.max_model_len + 1
    while too_long - longest > 1:
        middle = (longest + too_long) // 2
        if fits(middle):
            longest = middle
        else:
            too_long = middle
    return longest


class SteadyConcurrency(NamedTuple):
    """Requests that decode at once while the tokens in flight are shared among them.

    requests: how many fit; the fraction says how much of what a further one takes is left.
    blocks_per_request: blocks of one, by group, with one token in flight.
    reserved_blocks: blocks held back once, for all tokens in flight beyond one a request.
    """

    requests: float
    blocks_per_request: tuple[int, ...]
    reserved_blocks: int


def steady_concurrency(plan: CachePlan, num_tokens: int | None = None) -> SteadyConcurrency:
    """Requests of `num_tokens` tokens (the maximum by default) that fit once their prompts are computed.

    A step schedules at most `max_in_flight_tokens` over all requests, so what they add to windows is reserved
    once, in the worst split, and not for every request as in `CachePlan.concurrency`.
    """
    length = min(num_tokens or plan.max_model_len, plan.max_model_len)
    limits = dataclasses.replace(plan.limits, max_model_len=length)
    steady = blocks_per_request(plan.groups, dataclasses.replace(limits, max_in_flight_tokens=1))
    per_request = sum(steady)
    if not per_request:
        return SteadyConcurrency(math.inf, steady, 0)

    alike = Counter((group.spec, group.blocks_per_state) for group in plan.groups)
    kinds = [
        (CacheGroup(layer_names=(), spec=spec, blocks_per_state=states), times)
        for (spec, states), times in alike.items()
    ]

    def reserved(count: int) -> int:
        return sum(times * in_flight_reserve(group, limits, count) for group, times in kinds)

    def held(count: int) -> int:
        return count * per_request + reserved(count) if count else 0

    # A request more takes one token from the spare ones, and so lowers the reserve by no more than it holds.
    fitting, too_many = 0, plan.usable_blocks // per_request + 1
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if held(middle) <= plan.usable_blocks else (fitting, middle)
    partial = (plan.usable_blocks - held(fitting)) / (held(fitting + 1) - held(fitting))
    return SteadyConcurrency(fitting + partial, steady, reserved(max(fitting, 1)))


def longest_at_once(plan: CachePlan, num_requests: int) -> int:
    """Tokens that each of `num_requests` decoding requests may have so that all fit; 0: not even one."""
    longest, too_long = 0, plan.max_model_len + 1
    while too_long - longest > 1:
        middle = (longest + too_long) // 2
        if steady_concurrency(plan, middle).requests >= num_requests:
            longest = middle
        else:
            too_long = middle
    return longest


def in_flight_reserve(group: CacheGroup, limits: RequestLimits, num_requests: int) -> int:
    """The most blocks that `num_requests` requests together hold beyond their steady ones.

    Each has one token in flight; the remaining tokens go where they cost most blocks: first the few that make
    a request's run cross into its next block, then whole blocks.
    """
    spare = limits.max_in_flight_tokens - num_requests
    growth = _growth(group.spec, limits)
    if growth.first_cost is None or spare < growth.first_cost:
        return 0
    first = min(num_requests, spare // growth.first_cost)
    further = (spare - first * growth.first_cost) // group.spec.block_size
    return min(first + further, num_requests * growth.most) * group.blocks_per_state


class _Growth(NamedTuple):
    """first_cost: tokens in flight beyond one that make a request hold a block more; None: none does.
    most: blocks that all tokens in flight make it hold beyond those of one.
    """

    first_cost: int | None
    most: int


@functools.lru_cache(maxsize=4096)
def _growth(spec: KVCacheSpec, limits: RequestLimits) -> _Growth:
    def blocks(in_flight: int) -> int:
        return spec.max_blocks_per_request(dataclasses.replace(limits, max_in_flight_tokens=in_flight))

    steady = blocks(1)
    most = blocks(limits.max_in_flight_tokens) - steady
    if most <= 0:
        return _Growth(None, 0)
    low, high = 1, limits.max_in_flight_tokens - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if blocks(1 + middle) > steady else (middle + 1, high)
    return _Growth(low, most)
