"""What prompts may still take: against brute force over positions, ways to share a budget, and holdings by
hand.
"""

from itertools import product

import numpy as np
import pytest

from jaxkv.scheduling.demand import GroupDemand, Holding
from jaxkv.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    RequestLimits,
    SlidingWindowSpec,
)

NONE = np.empty(0, np.int32)


def limits(in_flight: int, max_model_len: int = 1000) -> RequestLimits:
    return RequestLimits(max_model_len=max_model_len, max_in_flight_tokens=in_flight)


def window(size: int, block_size: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(num_kv_heads=1, head_size=8, block_size=block_size, sliding_window=size)


def chunked(size: int, block_size: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        num_kv_heads=1, head_size=8, block_size=block_size, attention_chunk_size=size
    )


def full(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(num_kv_heads=1, head_size=8, block_size=block_size)


def held_at(spec: KVCacheSpec, computed: int, num_new: int) -> int:
    """Blocks touched by the readable past of token `computed` and `num_new` tokens from there, by
    counting.
    """
    if isinstance(spec, SlidingWindowSpec):
        first = max(0, computed - spec.sliding_window + 1)
    else:
        assert isinstance(spec, ChunkedLocalAttentionSpec)
        first = computed // spec.attention_chunk_size * spec.attention_chunk_size
    return len({token // spec.block_size for token in range(first, computed + num_new)})


SPECS = [window(8, 4), window(5, 4), window(6, 4), window(1, 4), window(3, 8), chunked(8, 4), chunked(6, 4)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.kind}-{s.block_size}-{s.unpadded_page_size_bytes}")
@pytest.mark.parametrize("in_flight", [2, 3, 7, 9])
@pytest.mark.parametrize("num_requests", [1, 2, 3])
def test_shared_bound_covers_every_way_to_share_the_tokens_and_is_reached_by_one_request(
    spec: KVCacheSpec, in_flight: int, num_requests: int
) -> None:
    if in_flight < num_requests:
        return
    period = 48
    most = {t: max(held_at(spec, c, t) for c in range(64, 64 + period)) for t in range(1, in_flight + 1)}
    reached = max(
        sum(most[t] for t in shares)
        for shares in product(range(1, in_flight + 1), repeat=num_requests)
        if sum(shares) <= in_flight
    )
    demand = GroupDemand(spec, 1, limits(in_flight))
    bound = num_requests * demand.most_held(900) + demand.shared_extra(num_requests)
    assert bound >= reached
    if num_requests == 1:
        assert bound == reached == spec.admission_blocks(900, limits(in_flight))


def test_window_8_block_4_with_7_in_flight_wants_5_blocks_once() -> None:
    demand = GroupDemand(window(8, 4), 1, limits(7))
    assert demand.still_wanted([40], [Holding(NONE, 0)], NONE) == 5
    # Two requests: 3 blocks each for 8 tokens, and 5 spare tokens cross a boundary after 2 and one after 2
    # or 4 more.
    assert demand.still_wanted([40, 40], [Holding(NONE, 0)] * 2, NONE) == 3 + 3 + 2


def test_a_short_prompt_wants_no_more_than_its_length() -> None:
    demand = GroupDemand(window(8, 4), 1, limits(7))
    assert demand.still_wanted([9], [Holding(NONE, 0)], NONE) == 3


def test_full_attention_wants_the_blocks_beyond_its_table() -> None:
    demand = GroupDemand(full(4), 3, limits(7))
    leaders = np.array([1, 4], np.int32)
    for holders in (1, 9):
        references = np.full(2, holders, np.int32)
        assert demand.still_wanted([17], [Holding(leaders, 2)], references) == 3 * (5 - 2)


def test_blocks_that_others_hold_too_do_not_pay_for_the_window() -> None:
    demand = GroupDemand(window(8, 4), 1, limits(7))
    ids = np.array([3, 4, 5], np.int32)
    alone = demand.still_wanted([40], [Holding(ids, 6)], np.array([1, 1, 1], np.int32))
    shared = demand.still_wanted([40], [Holding(ids, 6)], np.array([2, 2, 1], np.int32))
    assert (alone, shared) == (5 - 3, 5 - 1)


def test_blocks_shared_among_the_prompts_themselves_count_once() -> None:
    demand = GroupDemand(window(8, 4), 1, limits(7))
    ids = np.array([3, 4], np.int32)
    both = np.array([2, 2, 2, 2], np.int32)
    assert demand.still_wanted([40, 40], [Holding(ids, 2)] * 2, both) == 8 - 2


def test_a_prompt_about_to_end_wants_only_its_last_blocks() -> None:
    demand = GroupDemand(window(8, 4), 1, limits(7))
    held = Holding(np.array([3], np.int32), 9)
    assert demand.still_wanted([40], [held], np.array([1], np.int32)) == 1


def test_a_recurrent_state_is_wanted_until_it_is_held() -> None:
    spec = MambaSpec(block_size=4, shapes=((4,),), dtypes=("float32",))
    demand = GroupDemand(spec, 2, limits(7))
    assert demand.still_wanted([40], [Holding(NONE, 0)], NONE) == 4
    assert demand.still_wanted([40], [Holding(np.array([7], np.int32), 3)], np.ones(1, np.int32)) == 2
