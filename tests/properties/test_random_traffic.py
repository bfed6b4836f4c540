"""Random requests, chunks, decodes, aborts, preemptions, resets and resumes: at least 100,000 operations.

After every one the blocks are counted twice over, and every step reads exactly what its own tokens would have
written (see shadow.py). A failure names the case and the seed that repeat it.

A longer run: JAXKV_PROPERTY_OPERATIONS=2000000 python -m pytest tests/properties/test_random_traffic.py
"""

import os
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.properties.cache_driver import CacheDriver
from tests.properties.scheduler_driver import SchedulerDriver
from tests.properties.shadow_tier import TierKind
from tests.properties.workload import CacheCase, cache_cases

DEFAULT_OPERATIONS = 100_000
OPERATIONS = int(os.environ.get("JAXKV_PROPERTY_OPERATIONS", DEFAULT_OPERATIONS))

SEEDS = st.integers(0, 2**32)
LENGTHS = st.sampled_from([20, 100, 400])


class Budget:
    """Counts operations down: hypothesis cannot stop once enough was done. A failure may be repeated."""

    def __init__(self, operations: int) -> None:
        self.left = operations
        self.failed = False

    def run(self, drive: Callable[[], int]) -> None:
        if self.left <= 0 and not self.failed:
            return
        try:
            self.left -= drive()
        except BaseException:
            self.failed = True
            raise


def long_run(operations: int) -> settings:
    """The default run repeats itself; longer ones look at other cases each time."""
    return settings(
        max_examples=max(50, operations // 20),
        derandomize=OPERATIONS == DEFAULT_OPERATIONS,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def test_the_cache_manager_serves_random_traffic_right() -> None:
    operations = OPERATIONS * 7 // 10
    budget = Budget(operations)
    seen = {"hit tokens": 0, "did not fit": 0}

    @long_run(operations)
    @given(cache_cases(), SEEDS, LENGTHS)
    def traffic(case: CacheCase, seed: int, length: int) -> None:
        def drive() -> int:
            driver = CacheDriver(case, seed)
            driver.run(length)
            seen["hit tokens"] += driver.num_hit_tokens
            seen["did not fit"] += driver.num_refused
            return driver.num_ops

        budget.run(drive)

    traffic()
    assert budget.left <= 0
    # The traffic is of use only if it hits and runs out of blocks now and then.
    assert seen["hit tokens"] > operations // 10
    assert seen["did not fit"] > operations // 100


@pytest.mark.parametrize("batches_in_flight", [1, 2], ids=["one step at a time", "overlapping steps"])
def test_the_scheduler_serves_random_traffic_right(batches_in_flight: int) -> None:
    """No deadlock, nobody preempted again and again, and all blocks come back in the end."""
    operations = OPERATIONS * 3 // 20
    budget = Budget(operations)
    seen = {"finished": 0, "preempted": 0, "accepted": 0}

    @long_run(operations)
    @given(
        cache_cases(batches_in_flight=batches_in_flight),
        SEEDS,
        LENGTHS,
        st.sampled_from([1, 2, 4, 8]),
        st.sampled_from([0, 0, 5]),
        # Drafts follow results, so that steps with them do not overlap.
        st.sampled_from([0, 0, 1, 3] if batches_in_flight == 1 else [0]),
    )
    def traffic(
        case: CacheCase, seed: int, length: int, max_num_seqs: int, threshold: int, num_drafts: int
    ) -> None:
        def drive() -> int:
            driver = SchedulerDriver(
                case, seed, max_num_seqs=max_num_seqs, threshold=threshold, num_drafts=num_drafts
            )
            driver.run(length)
            seen["accepted"] += driver.scheduler.stats.spec_decode_num_accepted_tokens
            seen["finished"] += driver.num_finished
            seen["preempted"] += driver.scheduler.stats.num_preemptions
            return driver.num_ops

        budget.run(drive)

    traffic()
    assert budget.left <= 0
    assert seen["finished"] > operations // 20
    assert seen["preempted"] > operations // 500
    assert (seen["accepted"] > operations // 50) == (batches_in_flight == 1)


@pytest.mark.parametrize("batches_in_flight", [1, 2], ids=["one step at a time", "overlapping steps"])
def test_a_tier_outside_the_pool_brings_back_what_it_was_given(batches_in_flight: int) -> None:
    """At once or later, whole or not at all, and where it cannot be reached: no answer changes."""
    operations = OPERATIONS // 10
    budget = Budget(operations)
    seen: Counter[str] = Counter()

    @long_run(operations)
    @given(
        cache_cases(batches_in_flight=batches_in_flight).filter(lambda case: case.is_cached),
        SEEDS,
        LENGTHS,
        st.sampled_from(["at once", "meanwhile", "unreliable", "unreliable"]),
    )
    def traffic(case: CacheCase, seed: int, length: int, tier: TierKind) -> None:
        def drive() -> int:
            driver = SchedulerDriver(case, seed, tier=tier)
            driver.run(length)
            assert driver.tier is not None
            seen.update(driver.tier.counts)
            return driver.num_ops

        budget.run(drive)

    traffic()
    assert budget.left <= 0
    # It is of use only if much is brought back, and now and then something goes wrong.
    assert min(seen["matched"], seen["errors"]) > operations // 100, seen
    assert seen["lost"] > operations // 2000, seen
