"""An index that enters units late answers like one that enters them at once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.managers.prefix_index import PrefixIndex
from jaxkv.pool import BlockPool

NUM_UNITS = 40
OPERATIONS = st.tuples(
    st.sampled_from(["late", "late", "add", "remove", "look", "hash"]),
    st.lists(st.integers(1, NUM_UNITS - 1), unique=True, min_size=1, max_size=12),
    st.integers(0, 3),
)


def fresh_index() -> PrefixIndex:
    return PrefixIndex(BlockPool(NUM_UNITS))


@given(st.lists(OPERATIONS, max_size=120))
def test_units_entered_late_are_found_as_if_entered_at_once(
    operations: list[tuple[str, list[int], int]],
) -> None:
    late, plain = fresh_index(), fresh_index()
    held: dict[int, bytes] = {}
    for name, leaders, variant in operations:
        if name in ("late", "add"):
            new = np.array([leader for leader in leaders if leader not in held], np.intp)
            # Few different hashes, so that some are equal.
            hashes = [b"%d" % (leader % 7 + variant) for leader in new.tolist()]
            if hashes:
                (late.add_late if name == "late" else late.add)(hashes, new)
                plain.add(hashes, new)
                held.update(zip(new.tolist(), hashes, strict=True))
        elif name == "remove":
            gone = [leader for leader in leaders if leader in held]
            if len(gone) == 1:
                late.remove(gone[0])
                plain.remove(gone[0])
            elif gone:
                late.remove(np.array(gone))
                plain.remove(np.array(gone))
            for leader in gone:
                del held[leader]
        elif name == "look":
            assert late.units == plain.units
        else:
            assert late.hash_of(leaders[0]) == held.get(leaders[0])
    assert late.units == plain.units
    assert set(plain.units) == set(held.values())
    assert len(late) == len(set(held.values()))
