"""The order in which a request's units are to go, against a plain stable sort."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.pool import Units, by_end


@st.composite
def parts_of_a_request(draw: st.DrawFn) -> list[Units]:
    """Groups of one or of different block sizes that end together or not, and single units among them."""
    size, end = draw(st.sampled_from([1, 16])), draw(st.integers(0, 300))
    parts: list[Units] = []
    next_leader = 1
    for _ in range(draw(st.integers(1, 5))):
        n = draw(st.integers(0, 200))
        leaders = list(range(next_leader, next_leader + n))
        next_leader += n
        if draw(st.booleans()):
            step = size * draw(st.sampled_from([1, 1, 1, 2]))
            last = -size * draw(st.sampled_from([end, end, end, end + 1]))
            held = leaders if n < 3 else np.array(leaders, draw(st.sampled_from([np.intp, np.int32])))
            parts.append(Units(held, range(last, last + n * step, step)))
        else:
            few = leaders[: n // 20]
            places = st.lists(st.integers(-size * (end + 2), 2 * size), min_size=len(few), max_size=len(few))
            parts.append(Units(few, sorted(draw(places))))
    return parts


@given(parts_of_a_request())
def test_units_go_by_their_ends_and_equal_ends_by_their_place_among_the_parts(parts: list[Units]) -> None:
    pairs = [pair for units in parts for pair in zip(units.ranks, map(int, units.leaders), strict=True)]
    assert by_end(parts).tolist() == [leader for _, leader in sorted(pairs, key=lambda pair: pair[0])]
