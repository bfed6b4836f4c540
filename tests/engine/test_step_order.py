"""Rows that kernels may write while they read come first, and read nothing that the step only computes."""

from jaxkv.block_tables import padded_tables
from jaxkv.engine.step_order import count_decodes
from tests.scheduling.serving import Serving, full, mamba, window


def decodes_of_next_step(serving: Serving) -> tuple[list[str], list[int], int]:
    """Request ids, tokens and the count of a step that is then run."""
    output = serving.schedule()
    tables = padded_tables(
        serving.kv,
        output.rows,
        output.num_computed,
        num_seqs=len(output),
        widths=[16 if group.spec.kind != "mamba" else 1 for group in serving.plan.groups],
    )
    count = count_decodes(serving.plan, output, tables)
    serving.update()
    return output.request_ids.tolist(), output.num_scheduled.tolist(), count


def test_a_request_that_hits_what_the_step_computes_is_no_decode():
    serving = Serving([full(), window(8)], 50, max_num_batched_tokens=32)
    serving.add("old", range(50, 55))
    assert decodes_of_next_step(serving) == (["old"], [5], 0)
    serving.add("first", range(9))
    serving.add("second", range(9))
    assert decodes_of_next_step(serving) == (["old", "second", "first"], [1, 1, 9], 1)
    # From then on all three decode, over blocks of earlier steps.
    assert decodes_of_next_step(serving)[1:] == ([1, 1, 1], 3)
    # A hit on what earlier steps computed makes a decode at once.
    serving.add("third", range(9))
    assert decodes_of_next_step(serving)[1:] == ([1, 1, 1, 1], 4)


def test_states_do_not_count():
    """A request waits for a state that the step computes: what it then hits, an earlier step computed."""
    serving = Serving([full(), mamba()], 50, max_num_batched_tokens=32)
    serving.add("first", range(9))
    serving.add("second", range(9))
    assert decodes_of_next_step(serving) == (["first"], [8], 0)
    assert decodes_of_next_step(serving) == (["first", "second"], [1, 1], 2)
