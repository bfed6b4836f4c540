"""Eviction policies: what goes first, what is kept at all, and what ends of answers are worth."""

import numpy as np
import pytest

from jaxkv.continuations import Continuations
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
        # None is wanted before one was gone on from.
        assert kept == ([False] + [True] * 35 if not changed else [False] * 36)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_that_was_reset_decides_like_a_new_one(policy: str) -> None:
    """Chats go on from their answers; then other ones begin, in a pool that is too small for all of them."""

    def chats(served: Driver, num_chats: int, num_turns: int, seed: int) -> list[int]:
        hits = []
        for turn in range(num_turns):
            for chat in range(num_chats):
                first = seed + 100 * chat
                history = seq(first, 21 + 4 * chat)
                for earlier in range(turn):
                    history = history + seq(first + 2 * earlier + 1, 16)
                hits.append(served.hit(history))
                request = served.run(history)
                served.decode(request, seq(first + 2 * turn + 1, 8 if turn % 2 else 16))
                served.cache.free(request)
        return hits

    reset, new = (driver(policy, full(), window(8), mamba(), num_blocks=120) for _ in range(2))
    chats(reset, 3, 4, 10_000)
    assert reset.cache.reset_prefix_cache()
    assert chats(reset, 6, 4, 50_000) == chats(new, 6, 4, 50_000)


def test_a_request_that_resumes_is_learned_from_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is preempted, one prompt went on from where it did."""
    learned: list[str] = []
    monkeypatch.setattr(Continuations, "prompt", lambda *_: learned.append("prompt"))
    monkeypatch.setattr(Continuations, "boundary", lambda *_: learned.append("boundary"))
    served = driver("reach", full(), mamba())
    request = served.request(seq(1, 41))
    for num_preemptions in range(3):
        request.num_preemptions, request.num_computed_tokens = num_preemptions, 0
        served.prefill(request)
        served.cache.free(request, resumes=True)
    assert learned == ["prompt", "boundary"]


def test_an_answer_that_fills_no_block_says_nothing_about_ends_of_answers() -> None:
    """Its end is where its prompt ends, and what goes on from there goes on from the prompt."""
    served = driver("reach", full(), mamba(), num_blocks=4000)
    cache = served.cache
    for chat in range(10):
        history = seq(100 + chat, 21)
        for turn in range(3):
            request = served.run(history)
            served.decode(request, seq(1000 + 10 * chat + turn, 2))
            cache.free(request)
            history = history + seq(5000 + 10 * chat + turn, 8)
    states = cache.managers[1].index.units
    kept = []
    for chat in range(5):
        request = served.run(seq(200 + chat, 21))
        served.decode(request, seq(300 + chat, 8))
        cache.free(request)
        hashes = request.block_hashes(cache.hasher)
        kept.append([bool(cache.pool.strong[states[hashes[tokens // 4 - 1]]]) for tokens in (20, 28)])
    assert kept == [[True, False]] * 5


def test_answers_that_nobody_goes_on_from_go_before_any_prompt() -> None:
    served = driver("reach", full(), num_blocks=4000)
    cache = served.cache
    prompts = [seq(100 + chat, 21) for chat in range(10)]
    for turn in range(3):
        for chat, prompt in enumerate(prompts):
            request = served.run(prompt)
            served.decode(request, seq(1000 + 10 * chat + turn, 12))
            cache.free(request)
            prompt += seq(5000 + 10 * chat + turn, 8)
    weak = ~cache.pool.strong[cache.pool.free_units()]
    # Of the last turn each answer fills three blocks; one begins with the prompt's last token.
    assert int(weak.sum()) >= 3 * len(prompts)
    take_away(cache, len(cache.pool.plain_ids()) + int(weak.sum()))
    # 21 + 8 + 8 tokens were the prompt of the last turn.
    assert [served.hit(prompt) for prompt in prompts] == [36] * len(prompts)


def test_what_lies_beyond_the_last_aligned_place_goes_first() -> None:
    """Full attention in blocks of 4, windows in blocks of 16: nothing after the last 16 tokens can be hit."""
    served = driver("reach", full(4), window(16, 16))
    served.serve(seq(1, 47))
    cache = served.cache
    full_blocks = cache.managers[0].index.units
    strong = [bool(cache.pool.strong[leader]) for leader in full_blocks.values()]
    assert strong == [True] * 8 + [False] * 3


def test_a_place_that_was_hit_is_wanted() -> None:
    served = driver("reach", full(), mamba())
    # Chunks of 8 leave states that nobody asked for.
    served.serve(seq(1, 33), chunk=8)
    cache = served.cache
    hashes = served.request(seq(1, 33)).block_hashes(cache.hasher)
    state = cache.managers[1].index.units[hashes[16 // 4 - 1]]
    assert not cache.pool.strong[state]
    assert served.hit(seq(1, 18) + seq(2, 9)) == 16
    served.serve(seq(1, 18) + seq(2, 9))
    assert cache.pool.strong[state]


def test_states_and_windows_of_a_prompt_stay_as_long_as_its_full_attention() -> None:
    """They are let go of while the answer is decoded; another request ends in between."""
    for name, stays in (("reach", True), ("vllm", False)):
        served = driver(name, full(), window(8), mamba(), num_blocks=200)
        cache = served.cache
        long = served.run(seq(1, 33))
        served.decode(long, seq(2, 20))
        served.serve(seq(3, 33))
        cache.free(long)
        queue = cache.pool.free_units()
        theirs = set(queue[-len(queue) // 2 :].tolist())
        hashes = served.request(seq(1, 33)).block_hashes(cache.hasher)
        last = len(hashes) - 1
        serving = [cache.managers[1].index.units[hashes[last]], cache.managers[2].index.units[hashes[last]]]
        assert [leader in theirs for leader in serving] == [stays, stays], name
        check_integrity(cache)


def test_lower_boundaries_are_kept_where_prompts_part_right_before_their_ends() -> None:
    for parts, kept in ((True, True), (False, False)):
        served = driver("reach", full(), window(33), num_blocks=4000)
        for chat in range(20):
            history = seq(100 + chat, 81)
            for turn in range(3):
                served.serve(history)
                # The prompt's last block is another one in the next prompt, or the same.
                history = history[: -4 if parts else None] + seq(5000 + 10 * chat + turn, 24)
        boundaries = served.cache.eviction.with_lower((80,), 4)
        assert boundaries == ((76, 80) if kept else (80,))


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
