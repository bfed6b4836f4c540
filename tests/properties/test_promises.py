"""Whatever a plan promises, an empty engine runs."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxkv.cache_manager import KVCacheManager
from jaxkv.errors import JaxkvError
from jaxkv.planning.make_plan import make_plan
from jaxkv.planning.plan import PlanConfig
from jaxkv.request import Request
from jaxkv.scheduling.config import SchedulerConfig
from jaxkv.scheduling.scheduler import Scheduler
from tests.properties.hit_definition import GroupRule
from tests.properties.scheduler_driver import SchedulerDriver
from tests.properties.workload import LIMIT, CacheCase, cache_cases, make_spec

RUN = settings(
    max_examples=300,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def smallest_pool(case: CacheCase) -> CacheCase:
    """The case with exactly the blocks that its plan says one request of the maximum length holds."""
    return replace(case, num_blocks=1 + sum(case.plan().blocks_per_request))


@RUN
@given(cache_cases(batches_in_flight=1), st.integers(0, 999), st.integers(1, LIMIT - 1), st.integers(0, 2))
def test_the_longest_request_runs_alone_in_the_smallest_pool(
    case: CacheCase, seed: int, prompt_len: int, repeats: int
) -> None:
    """Every step moves it on, it is never preempted, and again when the cache is full of earlier requests."""
    driver = SchedulerDriver(smallest_pool(case), seed)
    for turn in range(1 + repeats):
        request = Request(f"longest-{turn}", [1] * prompt_len)
        driver.scheduler.add_request(request)
        num_steps = 0
        while not request.is_finished:
            output = driver.scheduler.schedule()
            assert len(output) == 1, "the only request does not run"
            assert not output.preempted
            driver.scheduler.update_from_output(output, [turn] * len(output.sampling))
            num_steps += 1
        assert request.num_tokens == LIMIT
        assert request.num_preemptions == 0
        assert num_steps >= LIMIT - prompt_len
    driver.manager.check_integrity()


@RUN
@given(cache_cases(batches_in_flight=1), st.integers(1, LIMIT))
def test_a_request_that_can_never_fit_is_refused_at_once(case: CacheCase, missing: int) -> None:
    plan = case.plan()
    # The last token of a request is never computed.
    limits = replace(plan.limits, max_model_len=LIMIT - 1)
    alone = sum(group.spec.max_blocks_per_request(limits) for group in plan.groups)
    if alone < 2:
        return
    driver = SchedulerDriver(replace(case, num_blocks=max(2, alone + 1 - missing)), 0)
    with pytest.raises(JaxkvError, match=r"blocks|tokens"):
        driver.scheduler.add_request(Request("too long", [1] * (LIMIT - 1)))
    assert driver.manager.num_free_blocks == driver.plan.usable_blocks
    assert not driver.scheduler.has_unfinished_requests


@pytest.mark.parametrize("with_window", [False, True])
def test_a_hit_inside_a_block_does_not_lock_a_request_out_of_the_smallest_pool(with_window: bool) -> None:
    """14 tokens take two blocks of 12. A hit of 4 takes a third: the block it ends in, beside its copy."""
    rules = [GroupRule("full", 12), GroupRule("sliding_window", 12, 20)][: 1 + with_window]
    driver = SchedulerDriver(CacheCase(rules=tuple(rules), num_blocks=1 + 2 * len(rules), match_unit=4), 0)
    for name, prompt in (("first", [1] * 8), ("second", [1] * 4 + [0] * 10)):
        request = Request(name, prompt, 2)
        driver.scheduler.add_request(request)
        for _ in range(2):
            output = driver.scheduler.schedule()
            driver.scheduler.update_from_output(output, [1] * len(output.sampling))
        assert request.is_finished
    driver.manager.check_integrity()


KINDS = st.sampled_from(["full", "sliding_window", "chunked_local", "mamba"])


@RUN
@given(
    st.lists(st.tuples(KINDS, st.integers(1, 3), st.integers(1, 40)), min_size=1, max_size=4),
    st.integers(1 << 10, 1 << 20),
    st.sampled_from(["unified", "split"]),
    st.sampled_from([4, 16, 64]),
    st.booleans(),
)
def test_what_planning_accepts_runs(
    kinds: list[tuple[str, int, int]], memory: int, policy: str, tokens: int, auto_fit: bool
) -> None:
    """From layers and bytes: planning refuses, or a request of the plan's maximum length runs to its end."""
    layers = {
        f"{kind}.{i}.{j}": make_spec(GroupRule(kind, 4, reach))
        for i, (kind, count, reach) in enumerate(kinds)
        for j in range(count)
    }
    config = PlanConfig(
        policy=policy,
        max_model_len=64,
        max_num_batched_tokens=tokens,
        max_num_seqs=4,
        page_alignment_bytes=1,
        auto_fit_max_model_len=auto_fit,
    )
    try:
        plan = make_plan(layers, config, memory)
    except JaxkvError:
        return
    manager = KVCacheManager(plan)
    scheduler = Scheduler(plan, manager, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=tokens))
    if plan.max_model_len < 2:
        return
    request = Request("longest", [1] * (plan.max_model_len - 1))
    scheduler.add_request(request)
    for _ in range(plan.max_model_len + 1):
        output = scheduler.schedule()
        assert len(output) == 1
        scheduler.update_from_output(output, [2] * len(output.sampling))
        if request.is_finished:
            break
    assert request.is_finished
    assert manager.num_free_blocks == plan.usable_blocks
