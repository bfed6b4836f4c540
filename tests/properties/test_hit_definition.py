"""The brute-force definition itself, held against cases worked out by hand."""

import pytest

from tests.properties.hit_definition import GroupRule, Unit, longest_hit

FULL = GroupRule("full", 4)


def hit(rules: list[GroupRule], cached: list[set[int]], num_tokens: int, hash_block: int = 4) -> int:
    held = [dict.fromkeys(blocks, rule.block_size) for rule, blocks in zip(rules, cached, strict=True)]
    return longest_hit(rules, held, num_tokens, Unit(hash_block))


@pytest.mark.parametrize(("num_tokens", "expected"), [(16, 12), (17, 16), (1, 0), (100, 16)])
def test_the_last_token_is_always_computed(num_tokens: int, expected: int) -> None:
    assert hit([FULL], [{0, 1, 2, 3}], num_tokens) == expected


def test_full_attention_stops_at_the_first_gap() -> None:
    assert hit([FULL], [{0, 1, 3, 4}], 40) == 8


def test_a_window_needs_only_its_last_tokens() -> None:
    # 28 tokens, window 8: tokens 21..27, which lie in blocks 5 and 6.
    window = GroupRule("sliding_window", 4, 8)
    assert window.blocks_needed(28) == [5, 6]
    assert hit([window], [{5, 6}], 40) == 28
    assert hit([window], [{6}], 40) == 0


def test_a_run_from_the_start_may_be_shorter_than_the_window() -> None:
    assert hit([GroupRule("sliding_window", 4, 100)], [{0, 1, 2, 3}], 17) == 16


def test_a_window_of_one_needs_nothing() -> None:
    assert GroupRule("sliding_window", 4, 1).blocks_needed(24) == []


def test_nothing_is_needed_at_a_chunk_boundary() -> None:
    local = GroupRule("chunked_local", 4, 8)
    assert local.blocks_needed(24) == []
    assert local.blocks_needed(20) == [4]
    # A chunk that is no multiple of the block: token 18 starts the chunk, in the middle of block 4.
    assert GroupRule("chunked_local", 4, 6).blocks_needed(20) == [4]


def test_a_recurrent_group_needs_the_state_at_the_end_alone() -> None:
    assert hit([FULL, GroupRule("mamba", 16)], [{0, 1, 2, 3, 4}, {8, 12}], 40) == 12


def test_unequal_blocks_meet_on_common_boundaries() -> None:
    rules = [GroupRule("full", 8), GroupRule("sliding_window", 4, 9)]
    assert hit(rules, [{0, 1, 2, 3, 4}, set(range(10))], 43) == 40
    assert hit(rules, [{0, 1, 2, 3, 4}, set(range(10)) - {8}], 43) == 32


def test_inside_a_block_a_hit_ends_where_its_content_does() -> None:
    held = [{0: 4, 1: 4, 2: 3}]
    assert longest_hit([FULL], held, 12, Unit(1, inside=True)) == 11
    assert longest_hit([FULL], held, 12, Unit(2, inside=True)) == 10
    assert longest_hit([FULL], held, 12, Unit(1)) == 8
    assert longest_hit([FULL, GroupRule("mamba", 4)], [*held, {8: 1}], 12, Unit(1, inside=True)) == 8


def test_a_group_that_needs_nothing_does_not_hold_to_its_blocks() -> None:
    assert longest_hit([FULL, GroupRule("sliding_window", 8, 1)], [{0: 4, 1: 4, 2: 4}, {}], 40, Unit(4)) == 12
    assert (
        longest_hit([FULL, GroupRule("sliding_window", 8, 2)], [{0: 4, 1: 4, 2: 4}, {0: 8}], 40, Unit(4)) == 8
    )


def test_an_eagle_group_needs_the_block_after() -> None:
    eagle = GroupRule("full", 4, is_eagle=True)
    assert hit([eagle], [set(range(10))], 41) == 36
    assert hit([FULL, eagle], [set(range(10)), set(range(8))], 41) == 28
    window = GroupRule("sliding_window", 4, 8, is_eagle=True)
    assert hit([window], [{5, 6}], 40) == 0
    assert hit([window], [{5, 6, 7}], 40) == 28


def test_a_group_alone_is_not_counted_where_it_needs_nothing() -> None:
    local = GroupRule("chunked_local", 4, 8)
    assert local.longest_alone({}, 30, Unit(4)) == 0
    assert local.longest_alone({6: 4}, 30, Unit(4)) == 28
    assert FULL.longest_alone({0: 4, 1: 4}, 30, Unit(4)) == 8
