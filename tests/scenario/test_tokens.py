"""Token rules of scenarios."""

import numpy as np
import pytest

from jaxkv.errors import JaxkvError
from jaxkv.scenario.tokens import MAX_TOKENS, TOKEN_LIMIT, parse_tokens


def tokens(raw: object) -> np.ndarray:
    return parse_tokens(raw, "tokens")


def test_one_seed_gives_one_sequence_whatever_its_length() -> None:
    np.testing.assert_array_equal(tokens({"seed": 3, "len": 10}), tokens({"seed": 3, "len": 500})[:10])


@pytest.mark.parametrize(("one", "other"), [(1, 2), (0, 1), (5, TOKEN_LIMIT - 1), (10, 11)])
def test_two_seeds_differ_at_every_position(one: int, other: int) -> None:
    assert (tokens({"seed": one, "len": 5000}) != tokens({"seed": other, "len": 5000})).all()


def test_seeded_ids_are_valid_int32() -> None:
    ids = tokens({"seed": TOKEN_LIMIT - 1, "len": 5000})
    assert ids.dtype == np.int32
    assert ids.min() >= 0


def test_rules_nest() -> None:
    ids = tokens({"concat": [{"range": [5, 8]}, [1, 2], {"concat": [{"repeat": [9, 3]}]}]})
    assert ids.tolist() == [5, 6, 7, 1, 2, 9, 9, 9]


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ([], "at least one token"),
        ([1, -1], "-1"),
        ([1, 2.5], "2.5"),
        ([True], "True"),
        ([TOKEN_LIMIT], str(TOKEN_LIMIT)),
        ({"seed": 1}, "'len'"),
        ({"seed": -1, "len": 2}, "-1"),
        ({"seed": TOKEN_LIMIT, "len": 2}, str(TOKEN_LIMIT)),
        ({"seed": 1, "len": MAX_TOKENS + 1}, str(MAX_TOKENS)),
        ({"seed": 1, "len": 2, "length": 3}, "'length'"),
        ({"range": [3, 1]}, "3..1"),
        ({"range": [0, TOKEN_LIMIT + 1]}, str(TOKEN_LIMIT)),
        ({"range": [3]}, "two"),
        ({"repeat": [1, MAX_TOKENS + 1]}, str(MAX_TOKENS)),
        ({"seeds": 1}, "'seed'"),
        ("abc", "'abc'"),
        (7, "7"),
    ],
)
def test_bad_rules_are_refused_by_name(raw: object, named: str) -> None:
    with pytest.raises(JaxkvError, match="tokens") as caught:
        tokens(raw)
    assert named in str(caught.value)
