"""Where the next lower boundary is kept: where it is little beside the boundary, in pools of few requests."""

from jaxkv.retention import lower_boundaries_from
from tests.core.builders import full, local, make_plan, mamba, window


def test_it_is_an_eighth_at_the_most_of_what_a_boundary_keeps() -> None:
    # One block more is an eighth of eight: one of the window's own, so seven of full attention.
    assert lower_boundaries_from(make_plan([full(4), window(8, 4)]), 4) == 7 * 4
    # A window of 33 keeps eight blocks by itself.
    assert lower_boundaries_from(make_plan([full(4), window(33, 4)]), 4) == 0
    # A hit there would need a state, too, unless states are not kept at all.
    assert lower_boundaries_from(make_plan([full(4), window(33, 4), mamba(4)]), 4) is None
    plan = make_plan([full(4), window(33, 4), mamba(4, mamba_cache_mode="none")])
    assert lower_boundaries_from(plan, 4) == 0
    # At the end of a chunk nothing is kept.
    assert lower_boundaries_from(make_plan([full(4), local(8, 4)]), 4) == 8 * 4


def test_small_windows_without_full_attention_never_keep_it() -> None:
    assert lower_boundaries_from(make_plan([window(8, 4)]), 4) is None
    assert lower_boundaries_from(make_plan([window(33, 4)]), 4) == 0
