"""Random caches and random requests that share prefixes in many ways."""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from jaxkv.cache_manager import KVCacheManager
from jaxkv.planning.make_plan import plan_from_groups
from jaxkv.planning.plan import CacheGroup, CachePlan, PlanConfig
from jaxkv.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    ScratchSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from tests.properties.hit_definition import GroupRule

CACHED_KINDS = ("full", "sliding_window", "chunked_local", "mla", "sliding_window_mla", "mamba")
LIMIT = 96
"""Tokens of the longest request."""


def make_spec(rule: GroupRule) -> KVCacheSpec:
    """A small spec that keeps what the rule says."""
    kind, block_size, reach = rule.kind, rule.block_size, rule.reach
    if kind == "full":
        return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8)
    if kind == "mla":
        return MLASpec(block_size=block_size, head_size=8)
    if kind == "sliding_window":
        return SlidingWindowSpec(block_size=block_size, num_kv_heads=1, head_size=8, sliding_window=reach)
    if kind == "sliding_window_mla":
        return SlidingWindowMLASpec(block_size=block_size, head_size=8, sliding_window=reach)
    if kind == "chunked_local":
        return ChunkedLocalAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=8, attention_chunk_size=reach
        )
    if kind == "mamba":
        return MambaSpec(block_size=block_size, shapes=((4,),), dtypes=("float32",))
    return ScratchSpec(block_size=block_size, num_kv_heads=1, head_size=8)


@dataclass(frozen=True, kw_only=True)
class CacheCase:
    """A cache to drive.

    match_unit: hits may end inside a block, at multiples of it; None: whole blocks.
    hash_lookahead: tokens after a block that its hash covers.
    """

    rules: tuple[GroupRule, ...]
    num_blocks: int
    max_num_batched_tokens: int = 32
    batches_in_flight: int = 1
    match_unit: int | None = None
    retention_interval: int | None = None
    enable_caching: bool = True
    hash_lookahead: int = 0

    def plan(self) -> CachePlan:
        groups = [
            CacheGroup(layer_names=(f"layer.{i}",), spec=make_spec(rule), is_eagle_group=rule.is_eagle)
            for i, rule in enumerate(self.rules)
        ]
        config = PlanConfig(
            max_model_len=LIMIT,
            max_num_batched_tokens=self.max_num_batched_tokens,
            batches_in_flight=self.batches_in_flight,
            enable_prefix_caching=self.enable_caching,
            prefix_match_unit=self.match_unit,
            page_alignment_bytes=1,
        )
        return plan_from_groups(groups, self.num_blocks, config)

    def manager(self) -> KVCacheManager:
        return KVCacheManager(
            self.plan(),
            enable_caching=self.enable_caching,
            retention_interval=self.retention_interval,
            prefix_match_unit=self.match_unit,
            num_hash_lookahead_tokens=self.hash_lookahead,
            max_num_seqs=4,
        )

    @property
    def is_cached(self) -> bool:
        """Whether anything can be found by its hash."""
        return self.enable_caching and bool(self.cacheable_groups)

    @property
    def cacheable_groups(self) -> list[int]:
        return [index for index, rule in enumerate(self.rules) if rule.kind != "scratch"]


@st.composite
def cache_cases(draw: st.DrawFn, max_groups: int = 5, batches_in_flight: int = 1) -> CacheCase:
    """1 to `max_groups` groups of mixed kinds; unequal blocks; pools from tight to roomy."""
    unit = draw(st.sampled_from([1, 2, 4]))
    num_groups = draw(st.integers(1, max_groups))
    rules: list[GroupRule] = []
    for _ in range(num_groups):
        if rules and draw(st.booleans()):
            # A sibling: equal specs share a manager.
            rules.append(draw(st.sampled_from(rules)))
            continue
        kind = draw(st.sampled_from((*CACHED_KINDS, "scratch") if rules else CACHED_KINDS))
        block = unit * draw(st.sampled_from([1, 2, 3, 4]))
        has_reach = "window" in kind or kind == "chunked_local"
        reach = draw(st.integers(1, 24)) if has_reach else 0
        eagle = kind not in ("mamba", "scratch") and draw(st.sampled_from([False] * 7 + [True]))
        rules.append(GroupRule(kind, block, reach, eagle))
    case = CacheCase(
        rules=tuple(rules),
        num_blocks=2,
        max_num_batched_tokens=draw(st.sampled_from([8, 16, 40])),
        batches_in_flight=batches_in_flight,
        match_unit=unit if draw(st.booleans()) else None,
        enable_caching=draw(st.sampled_from([True] * 7 + [False])),
        hash_lookahead=draw(st.sampled_from([0] * 5 + [1, 3])),
    )
    plan = case.plan()
    alone = sum(plan.blocks_per_request)
    return dataclasses.replace(
        case,
        num_blocks=1 + alone + draw(st.sampled_from([0, alone // 8, alone // 2, alone, 3 * alone])),
        retention_interval=draw(st.sampled_from([None, 0, plan.scheduler_block_size * 2])),
    )


class PromptSource:
    """Prompts that branch off a few stems at random places, and tokens that continue them alike or not."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._stems: list[list[int]] = [[]]

    def prompt(self, max_len: int) -> list[int]:
        """1 to `max_len` tokens."""
        rng = self._rng
        stem = rng.choice(self._stems)
        kept = len(stem) if rng.random() < 0.3 else rng.randint(0, len(stem))
        fresh = rng.choice([0, 1, rng.randint(1, 40)])
        tokens = (stem[:kept] + [rng.randint(0, 2) for _ in range(fresh)])[:max_len] or [rng.randint(0, 2)]
        self.remember(tokens)
        return tokens

    def next_token(self) -> int:
        return self._rng.choice([0, 0, 1])

    def remember(self, tokens: Sequence[int]) -> None:
        """Later prompts may continue these tokens."""
        if len(self._stems) < 6:
            self._stems.append(list(tokens))
        else:
            self._stems[self._rng.randrange(1, len(self._stems))] = list(tokens)
