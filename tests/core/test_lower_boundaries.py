"""Where the next lower boundary is kept: where it is little beside the boundary, in pools of few requests."""

from jaxkv.retention import lower_boundaries_from
from tests.core.builders import full, local, make_plan, mamba, window


def test_it_is_an_eighth_at_the_most_of_what_a_boundary_keeps() -> None:
    # One block more is an eighth of eight: one of the window's own, so seven of full attention.
    assert lower_boundaries_from(make_plan([full(4), window(8, 4)]), 4) == 7 * 4
    # A window of 33 keeps eight blocks by itself.
    assert lower_boundaries_from(make_plan([full(4), window(33, 4)]), 4) == 0
    # A state of three blocks counts as well.
    plan = make_plan([full(4), window(8, 4), mamba(4)], blocks_per_state=3)
    assert lower_boundaries_from(plan, 4) == 4 * 4
    # At the end of a chunk nothing is kept.
    assert lower_boundaries_from(make_plan([full(4), local(8, 4)]), 4) == 8 * 4


def test_small_windows_without_full_attention_never_keep_it() -> None:
    assert lower_boundaries_from(make_plan([window(8, 4)]), 4) is None
    assert lower_boundaries_from(make_plan([window(33, 4)]), 4) == 0


def test_pools_of_many_requests_never_keep_it() -> None:
    specs = [full(4), window(33, 4)]
    few, many = make_plan(specs, 150, max_model_len=40), make_plan(specs, 200, max_model_len=40)
    assert few.concurrency < 8 < many.concurrency
    assert lower_boundaries_from(few, 4) == 0
    assert lower_boundaries_from(many, 4) is None
