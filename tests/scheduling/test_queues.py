"""The order of service: the queue, the running rows, and where a chunk ends."""

import numpy as np
import pytest

from jaxkv.request import Request, RequestStatus
from jaxkv.scheduling.chunks import chunk_end
from jaxkv.scheduling.running import RunningRows
from jaxkv.scheduling.waiting import ServiceKey, WaitingQueue


def waiting(name: str, status: RequestStatus = RequestStatus.WAITING) -> Request:
    request = Request(name, [1])
    request.status = status
    return request


def test_waiting_order_is_priority_then_arrival_then_order_of_adding() -> None:
    queue = WaitingQueue()
    for name, key in [
        ("late", ServiceKey(0, 9.0, 0)),
        ("early", ServiceKey(0, 1.0, 1)),
        ("also_early", ServiceKey(0, 1.0, 2)),
        ("urgent", ServiceKey(-1, 50.0, 3)),
    ]:
        queue.add(waiting(name), key)
    assert [r.request_id for r in queue] == ["urgent", "early", "also_early", "late"]
    queue.remove(ServiceKey(0, 1.0, 1))
    assert [r.request_id for r in queue] == ["urgent", "also_early", "late"]
    with pytest.raises(KeyError):
        queue.remove(ServiceKey(0, 1.0, 1))


def test_preempted_requests_come_before_new_ones() -> None:
    queue = WaitingQueue()
    queue.add(waiting("new"), ServiceKey(0, 0.0, 0))
    queue.add(waiting("resumed_late", RequestStatus.PREEMPTED), ServiceKey(0, 5.0, 2))
    queue.add(waiting("resumed_early", RequestStatus.PREEMPTED), ServiceKey(0, 4.0, 1))
    assert [r.request_id for r in queue] == ["resumed_early", "resumed_late", "new"]
    assert len(queue) == 3


def test_running_rows_stay_sorted_and_old_arrays_stay_as_they_were() -> None:
    running = RunningRows()
    running.add(7, ServiceKey(0, 2.0, 2))
    running.add(3, ServiceKey(0, 1.0, 1))
    before = running.rows
    running.add(5, ServiceKey(0, 1.5, 3))
    assert before.tolist() == [3, 7]
    assert running.rows.tolist() == [3, 5, 7]
    running.remove(ServiceKey(0, 1.0, 1))
    assert running.rows.tolist() == [5, 7]
    assert running.rows.dtype == np.int32
    with pytest.raises(KeyError):
        running.remove(ServiceKey(0, 1.0, 1))


def chunks(prompt: int, budget: int, alignment: int, keep: tuple[int, ...] = ()) -> list[int]:
    ends = [0]
    while ends[-1] < prompt:
        ends.append(chunk_end(ends[-1], min(prompt, ends[-1] + budget), prompt, alignment, keep))
    return ends[1:]


def test_chunks_without_recurrent_layers_take_the_whole_budget() -> None:
    assert chunks(150, 64, 1) == [64, 128, 150]


def test_chunks_end_at_the_last_position_a_resend_can_hit() -> None:
    assert chunks(30, 64, 4, (28,)) == [28, 30]
    assert chunks(150, 64, 16, (144,)) == [64, 128, 144, 150]
    assert chunks(150, 50, 16, (144,)) == [48, 96, 144, 150]


def test_chunks_pass_positions_whose_states_fit_inside() -> None:
    assert chunk_end(0, 64, 64, 4, (28, 40, 60)) == 28
    assert chunk_end(0, 64, 64, 4, (28, 40, 60), num_inside=1) == 40
    assert chunk_end(0, 64, 64, 4, (60, 40, 28), num_inside=2) == 60
    assert chunk_end(0, 64, 64, 4, (28, 40, 60), num_inside=3) == 64
    assert chunk_end(0, 50, 64, 4, (28, 40, 60), num_inside=2) == 48
    assert chunk_end(40, 64, 64, 4, (28, 40, 60), num_inside=1) == 64


def test_chunks_end_at_a_branch_point() -> None:
    assert chunks(160, 2048, 16, (96, 144)) == [96, 144, 160]


def test_a_budget_below_the_alignment_still_moves_on_and_meets_the_boundary() -> None:
    assert chunks(40, 10, 16, (32,)) == [10, 16, 26, 32, 40]


def test_unequal_blocks_end_chunks_where_every_group_can_hit() -> None:
    # Blocks of 32 and 16: hits begin at multiples of 32, for every prompt.
    for prompt in range(33, 257):
        assert (prompt - 1) // 32 * 32 in chunks(prompt, 48, 32, ((prompt - 1) // 32 * 32,))
