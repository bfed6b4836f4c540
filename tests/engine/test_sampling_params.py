import pytest

from jaxkv.engine.sampling_params import SamplingParams
from jaxkv.errors import JaxkvError


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("temperature", -0.1, "at least 0"),
        ("temperature", float("nan"), "at least 0"),
        ("temperature", float("inf"), "at least 0"),
        ("top_p", 0.0, "above 0"),
        ("top_p", 1.5, "at most 1"),
        ("top_k", -1, "at least 0"),
        ("top_k", 1.5, "at least 0"),
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 2.0, "at least 0"),
        ("min_tokens", 17, "more than max_tokens 16"),
        ("seed", -1, "from 0 to 4294967295"),
        ("seed", 2**32, "from 0 to 4294967295"),
        ("logprobs", 21, "from 0 to 20"),
        ("stop_token_ids", (-3,), "at least 0"),
        ("stop_token_ids", 3, "must be a list"),
        ("stop", 5, "must be a list"),
        ("stop", ("a", b"b"), "must be text"),
        ("stop", "a\ud800", "character 1 is"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_limit(field, value, named):
    with pytest.raises(JaxkvError) as error:
        SamplingParams(**{field: value})
    assert named in str(error.value)
    assert field.split("_ids")[0].replace("_", " ") in str(error.value).replace("_", " ")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(JaxkvError, match="stop string"):
        SamplingParams(stop=("a", ""))


def test_one_stop_string_may_be_given_bare():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
