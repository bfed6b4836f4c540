import re
from typing import Any

import pytest

from jaxkv.cache_manager import KVCacheManager
from jaxkv.errors import JaxkvError
from tests.core.builders import full, local, make_cache, make_plan, mamba, window

BAD: list[tuple[str, list, dict[str, Any], dict[str, Any], str]] = [
    ("hash", [full(6)], {"hash_block_size": 4}, {}, r"blocks of 6 tokens.*hash block of 4"),
    ("state hash", [full(4), mamba(6)], {"hash_block_size": 4}, {}, r"states every 6 tokens"),
    ("eagle state", [full(4), mamba()], {"eagle": [1]}, {}, r"group 1 is an EAGLE group of recurrent"),
    (
        "dcp window",
        [full(4), window(8)],
        {"decode_context_parallel_size": 2},
        {},
        r"size 2: group 1 .*window",
    ),
    # Without a state at its end, a hit would go on from a state of nothing.
    ("no states", [full(4), mamba(mamba_cache_mode="none")], {}, {}, r"group 1 .*mode 'none'.*'align'"),
    ("uncached full", [full(4), full(8, prefix_cacheable=False)], {}, {}, r"group 1 of kind 'full'"),
    ("uncached window", [full(4), window(8, prefix_cacheable=False)], {}, {}, r"caching must be False"),
    ("uncached states", [full(4), mamba(prefix_cacheable=False)], {}, {}, r"group 1 of kind 'mamba'"),
    ("dcp local", [local(8)], {"decode_context_parallel_size": 2}, {}, r"chunked_local"),
    ("mtp", [full(4)], {"eagle": [0], "num_lookahead_tokens": 5}, {}, r"block of 4 tokens.* 5 tokens"),
    ("interval", [full(4), window(8, 6)], {}, {"retention_interval": 8}, r"interval 8 .*multiple of 12"),
    ("negative interval", [full(4)], {}, {"retention_interval": -4}, r"-4"),
    ("algorithm", [full(4)], {}, {"hash_algo": "crc"}, r"'crc'"),
    ("rows", [full(4)], {}, {"max_num_seqs": 0}, r"max_num_seqs.*0"),
]


@pytest.mark.parametrize(("specs", "plan", "options", "named"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_groups_that_cannot_be_right_together_are_refused_with_their_values(
    specs: list, plan: dict[str, Any], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(JaxkvError, match=re.compile(named, re.DOTALL)):
        KVCacheManager(make_plan(specs, **plan), **options)


def test_without_caching_neither_hashes_nor_what_is_kept_matter() -> None:
    specs = [full(6), mamba(10), mamba(mamba_cache_mode="none"), window(8, prefix_cacheable=False)]
    make_cache(specs, hash_block_size=4, options={"enable_caching": False})


def test_look_ahead_hashes_need_no_dropped_block() -> None:
    plan = make_plan([full(4)], eagle=[0], num_lookahead_tokens=5)
    KVCacheManager(plan, num_hash_lookahead_tokens=5)


def test_replicated_drafts_and_states_go_with_context_parallelism() -> None:
    cache = make_cache(
        [full(4), window(8, dcp_sharded=False), mamba(8)], decode_context_parallel_size=2, hash_block_size=4
    )
    assert [manager.block_size for manager in cache.managers] == [8, 4, 8]
    assert cache.chunk_alignment == 8


def test_the_alignment_counts_blocks_that_must_hit_whole() -> None:
    assert make_cache([full(4), window(8, 6)]).chunk_alignment == 12
    assert make_cache([full(4), mamba(12)]).chunk_alignment == 4
    assert make_cache([full(4), window(1, 16)]).chunk_alignment == 4
    fine = make_cache([full(16)], hash_block_size=4, options={"prefix_match_unit": 4})
    assert fine.chunk_alignment == 4
