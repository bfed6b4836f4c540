"""Whatever a public constructor or call is given, it works or says what is wrong, by a JaxkvError.

Every field of every constructor gets every piece of junk, one at a time.
"""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from jaxkv.accelerators import find_accelerator
from jaxkv.cache_manager import KVCacheManager
from jaxkv.errors import JaxkvError
from jaxkv.hashing import make_hasher
from jaxkv.memory_size import parse_memory_size
from jaxkv.metrics import ResidencySampler
from jaxkv.planning.plan import CacheGroup, CachePlan, PlanConfig
from jaxkv.pool import BlockPool
from jaxkv.request import EncoderInput, MultimodalInput, Request
from jaxkv.scheduling import Scheduler, SchedulerConfig
from jaxkv.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLASpec,
    RequestLimits,
    ScratchSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from tests.core.builders import full, make_plan, window

JUNK: tuple[Any, ...] = (
    *(None, True, "x", "a\ud800", b"x", -1, 0, 3.7, math.nan, math.inf, 10**30, Fraction(1, 3)),
    *(np.int64(1), np.bool_(True), [], {}, (), set(), [None], ["x"], [[1]], object(), np.array([1.5]), len),
)
ATTENTION: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8}
PLAN = make_plan([full(), window(8)])
ONE_STEP = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)


def defaults(made: Any) -> dict[str, Any]:
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}


CASES: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (FullAttentionSpec, defaults(FullAttentionSpec(**ATTENTION))),
    (SlidingWindowSpec, defaults(SlidingWindowSpec(**ATTENTION, sliding_window=4))),
    (ChunkedLocalAttentionSpec, defaults(ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=4))),
    (MLASpec, defaults(MLASpec(block_size=4, head_size=8))),
    (SlidingWindowMLASpec, defaults(SlidingWindowMLASpec(block_size=4, head_size=8, sliding_window=4))),
    (MambaSpec, defaults(MambaSpec(block_size=4, shapes=((4,),), dtypes=("float32",)))),
    (CrossAttentionSpec, defaults(CrossAttentionSpec(**ATTENTION))),
    (ScratchSpec, defaults(ScratchSpec(**ATTENTION))),
    (RequestLimits, defaults(RequestLimits(max_model_len=8, max_in_flight_tokens=8))),
    (CacheGroup, defaults(CacheGroup(layer_names=("a",), spec=full()))),
    (CachePlan, defaults(PLAN)),
    (PlanConfig, defaults(PlanConfig())),
    (SchedulerConfig, defaults(SchedulerConfig())),
    (Scheduler, {"plan": PLAN, "cache_manager": KVCacheManager(PLAN), "config": ONE_STEP, "connector": None}),
    (MultimodalInput, {"identifier": "a", "offset": 0, "length": 1}),
    (EncoderInput, {"identifier": "a", "length": 1}),
    (make_hasher, {"name": "sha256", "hash_block_size": 4, "num_lookahead_tokens": 0}),
    (BlockPool, {"num_blocks": 4}),
    (ResidencySampler, {"rate": 0.5}),
    (parse_memory_size, {"text": "4GiB"}),
    (find_accelerator, {"name": "cpu"}),
    (
        KVCacheManager,
        {
            "plan": PLAN,
            "enable_caching": True,
            "hash_algo": "sha256",
            "retention_interval": 0,
            "prefix_match_unit": None,
            "num_hash_lookahead_tokens": 0,
            "enable_kv_cache_events": False,
            "residency_sampling": 0.0,
            "max_num_seqs": 8,
        },
    ),
    (
        Request,
        {
            "request_id": "a",
            "prompt_token_ids": [1, 2],
            "max_tokens": None,
            "arrival": None,
            "priority": 0,
            "end_token_ids": (),
            "cache_salt": None,
            "lora_name": None,
            "multimodal_inputs": (),
            "encoder_input": None,
        },
    ),
]


@pytest.mark.parametrize(("make", "good"), CASES, ids=[make.__name__ for make, _ in CASES])
def test_a_constructor_takes_junk_or_says_what_is_wrong(
    make: Callable[..., Any], good: dict[str, Any]
) -> None:
    make(**good)
    others: list[str] = []
    for field in good:
        for junk in JUNK:
            try:
                make(**{**good, field: junk})
            except JaxkvError:
                pass
            except Exception as error:
                others.append(f"{field}={junk!r}: {error!r}")
    assert not others


@pytest.mark.parametrize(
    "call",
    [
        lambda cache, junk: cache.get_computed_blocks(junk),
        lambda cache, junk: cache.allocate_slots(junk, 2),
        lambda cache, junk: cache.free(junk),
        lambda cache, junk: cache.allocate_slots(Request("b", [1, 2]), junk),
        lambda cache, junk: cache.allocate_slots(Request("b", [1, 2]), 2, num_lookahead_tokens=junk),
        lambda cache, junk: cache.allocate_slots(Request("b", [1, 2]), 2, num_external_tokens=junk),
        lambda cache, junk: cache.allocate_slots(Request("b", [1, 2]), 2, num_encoder_tokens=junk),
        lambda cache, junk: cache.allocate_slots(Request("b", [1, 2]), 2, hit=junk),
        lambda cache, junk: cache.cache_blocks(Request("b", [1, 2]), junk),
        lambda cache, junk: cache.remove_skipped_blocks(Request("b", [1, 2]), junk),
        lambda cache, junk: cache.row_of(junk),
        lambda cache, junk: cache.get_block_ids(junk),
        lambda cache, junk: cache.allocate_decodes(junk, np.array([3])),
        lambda cache, junk: cache.allocate_decodes(np.array([0]), junk),
        lambda cache, junk: cache.allocate_decodes(np.array([0]), np.array([3]), num_lookahead_tokens=junk),
        lambda cache, junk: cache.rewind(junk, np.array([3])),
        lambda cache, junk: cache.rewind(np.array([0]), junk),
    ],
)
def test_a_call_of_the_cache_takes_junk_or_says_what_is_wrong(
    call: Callable[[KVCacheManager, Any], Any],
) -> None:
    others: list[str] = []
    for junk in JUNK:
        cache = KVCacheManager(PLAN)
        cache.allocate_slots(Request("a", [1, 2]), 2)
        try:
            call(cache, junk)
        except JaxkvError:
            pass
        except Exception as error:
            others.append(f"{junk!r}: {error!r}")
        cache.check_integrity()
    assert not others
