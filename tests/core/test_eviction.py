"""Eviction policies: what goes first, what is kept at all, and what ends of answers are worth."""

import numpy as np
import pytest

from jaxkv.errors import JaxkvError
from jaxkv.eviction import POLICIES, FlopsPerByte, make_eviction_policy
from jaxkv.integrity import check_integrity
from tests.core.builders import Driver, full, make_cache, mamba, seq, take_away, window


def driver(policy: object, *specs: object, num_blocks: int = 100) -> Driver:
    return Driver(make_cache(list(specs), num_blocks=num_blocks, options={"eviction": policy}))  # type: ignore[arg-type]


def test_unwanted_content_goes_first_unless_the_policy_is_plain_lru() -> None:
    for name, expected in (("reach", 0), ("lru", 1)):
        served = driver(name, full(), window(8))
        served.serve(seq(1, 41))
        pool = served.cache.pool
        # The blocks of the window inside the prompt are unwanted; the last one of full attention is wanted.
        take_away(served.cache, len(pool.plain_ids()) + int((~pool.strong[pool.free_units()]).sum()))
        assert int(served.hit(seq(1, 41)) < 40) == expected, name


def test_the_published_policy_caches_only_what_it_wants() -> None:
    served = driver("vllm", full(), window(8), mamba())
    served.serve(seq(1, 41))
    cache = served.cache
    assert cache.pool.strong[cache.pool.free_units()].all()
    # A window of 8 that a hit of 40 needs: tokens 33 to 39.
    assert len(cache.pool.cached_units(1)) == 2
    assert len(cache.pool.cached_units(2)) == 1
    check_integrity(cache)


def test_the_published_policy_gives_up_one_group_after_the_other() -> None:
    served = driver("vllm", full(), window(8))
    served.serve(seq(1, 41))
    cache = served.cache
    owners = cache.pool.cached_by[cache.pool.free_units()].tolist()
    # The window's two blocks are among those let go of last, behind all of full attention's.
    assert owners == [0] * 10 + [1] * 2


def test_ends_of_answers_are_kept_as_long_as_requests_go_on_from_them() -> None:
    """Chats whose answers come back, and chats whose answers never do."""
    for changed in (False, True):
        served = driver("reach", full(), mamba(), num_blocks=4000)
        kept = []
        for chat in range(12):
            history = seq(100 + chat, 21)
            for turn in range(3):
                request = served.run(history)
                answer = seq(1000 + 10 * chat + turn, 8)
                served.decode(request, answer)
                cache = served.cache
                cache.free(request)
                hashes = served.request(history + answer).block_hashes(cache.hasher)
                leader = cache.managers[1].index.units[hashes[(len(history) + len(answer)) // 4 - 1]]
                kept.append(bool(cache.pool.strong[leader]))
                sent = seq(5000 + 10 * chat + turn, 8) if changed else answer
                history = history + sent + seq(9000 + 10 * chat + turn, 8)
        assert kept[0]
        assert all(kept) if not changed else not any(kept[-6:])


def test_what_saves_more_flops_for_its_bytes_stays_longer() -> None:
    """Of two prompts that are equally long, the one freed last is the one that stays; of a long and a short
    one the long one does, though it is older: each of its tokens costs more."""
    for lengths, survivor in (((41, 41), 1), ((161, 9, 9, 9), 0)):
        served = driver(FlopsPerByte(lambda n: n * n), full(), num_blocks=2000)
        prompts = [seq(1 + index, length) for index, length in enumerate(lengths)]
        for prompt in prompts:
            served.serve(prompt)
        pool = served.cache.pool
        first = pool.free_units()
        pool.make_room(len(pool.plain_ids()) + 2)
        gone = set(first.tolist()) - set(pool.free_units().tolist())
        assert len(gone) == 2
        assert served.hit(prompts[survivor]) == (lengths[survivor] - 1) // 4 * 4
        served.cache.check_integrity()


def test_levels_are_a_matter_of_age() -> None:
    served = driver(FlopsPerByte(), full(), num_blocks=60)
    served.serve(seq(1, 41))
    served.serve(seq(2, 41))
    pool = served.cache.pool
    pool.credits = [0] * len(pool.credits)
    order = pool.free_units()
    pool.make_room(len(pool.plain_ids()) + 3)
    assert not np.isin(order[:3], pool.free_units()).any()


def test_policies_are_known_by_name() -> None:
    assert set(POLICIES) == {"reach", "lru", "flops", "vllm"}
    with pytest.raises(JaxkvError, match="unknown eviction policy 'x'; known are reach, lru, flops, vllm"):
        make_eviction_policy("x")
