"""A step that would read or write a wrong state is refused before the device sees it."""

from typing import NamedTuple

import numpy as np
import pytest

from jaxkv.block_tables import StateTable, padded_tables
from jaxkv.cache_manager import KVCacheManager
from jaxkv.engine.table_checks import check_states, check_written_states
from jaxkv.errors import JaxkvError
from jaxkv.managers import MambaManager
from jaxkv.request import Request
from jaxkv.scheduling import Scheduler, SchedulerConfig, SchedulerOutput
from tests.core.builders import full, make_cache, mamba


class Step(NamedTuple):
    cache: KVCacheManager
    manager: MambaManager
    output: SchedulerOutput

    def table(self) -> StateTable:
        widths = [10, 1]
        tables = padded_tables(
            self.cache, self.output.rows, self.output.num_computed, num_seqs=4, widths=widths
        )
        assert isinstance(tables[1], StateTable)
        return tables[1]

    def check(self, table: StateTable | None = None) -> None:
        check_states(self.cache.plan, 1, self.table() if table is None else table, self.output)
        check_written_states(self.cache, self.output)


def second_step(prompt: int = 10, *, first_chunk: int = 6) -> Step:
    """A request of `prompt` tokens after its first chunk; states stand on blocks of 4 tokens, and at one
    boundary inside a chunk.
    """
    cache = make_cache([full(), mamba(num_prefill_checkpoint_blocks=1)], blocks_per_state=2)
    scheduler = Scheduler(
        cache.plan, cache, SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=first_chunk)
    )
    scheduler.add_request(Request("a", range(prompt), 5))
    output = scheduler.schedule()
    scheduler.update_from_output(output, np.zeros(len(output.sampling), np.int32))
    manager = next(manager for manager in cache.managers if isinstance(manager, MambaManager))
    return Step(cache, manager, scheduler.schedule())


def test_right_steps_pass():
    for prompt, chunk in ((10, 6), (12, 8), (9, 9), (20, 3)):
        second_step(prompt, first_chunk=chunk).check()


@pytest.mark.parametrize(("field", "wrong"), [("read", -1), ("write", 100), ("checkpoint", 10**6)])
def test_an_id_outside_the_pool_is_refused(field, wrong):
    step = second_step()
    table = step.table()
    getattr(table, field)[0].reshape(-1)[1] = wrong
    with pytest.raises(
        JaxkvError, match=f"'a' has block id {wrong} at entry 1 .* group 1; ids are from 1 to 99"
    ):
        step.check(table)


def test_a_state_that_is_missing_is_refused():
    step = second_step()
    table = step.table()
    table.write[0, 1] = 0
    with pytest.raises(JaxkvError, match="'a' has no state of group 1 to write to"):
        step.check(table)


def test_zeros_are_the_state_of_no_tokens_and_of_no_others():
    step = second_step()
    table = step.table()
    table.read[0] = 0
    with pytest.raises(JaxkvError, match=r"'a' has 4 computed tokens and reads .* \[0, 0\] of group 1"):
        step.check(table)


def test_a_state_that_others_may_resume_from_is_never_written():
    step = second_step(prompt=12, first_chunk=8)
    # The first chunk left a state at 8, which is in the index: this step must not write it.
    assert step.table().read[0, 0] != step.table().write[0, 0]
    step.manager.current[0] = step.manager.previous[0]
    with pytest.raises(JaxkvError, match=r"'a' must not write the state in block .* is cached"):
        step.check()


def test_a_state_left_inside_a_chunk_is_written_by_its_holder_alone():
    step = second_step(prompt=30, first_chunk=16)
    [position] = step.table().checkpoint_lens[0].tolist()
    assert position == 28
    inside = step.manager.step_checkpoints(np.array([0]), np.array([16])).leaders
    step.cache.pool.touch(step.manager.number, inside)
    with pytest.raises(JaxkvError, match=f"in block {inside[0]} of group 1: it has 2 holders"):
        step.check()


def test_a_state_that_two_hold_is_never_written():
    step = second_step()
    step.cache.pool.touch(step.manager.number, step.manager.current[:1])
    with pytest.raises(JaxkvError, match="it has 2 holders and is not cached"):
        step.check()
