import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.engine.answer_text import AnswerText


class Letters:
    """A decoder whose tokens are characters; the last one given is kept for `finish`, as an unfinished one
    would be.
    """

    def __init__(self):
        self.kept = ""

    def push(self, token_id):
        text, self.kept = self.kept, chr(token_id)
        return text

    def finish(self):
        text, self.kept = self.kept, ""
        return text


def feed(text, stop, min_tokens=0):
    answer = AnswerText(Letters(), stop, min_tokens)
    parts = [answer.push([ord(letter)]) for letter in text]
    return answer, [*parts, answer.finish()]


@given(st.text("ab c", max_size=12), st.lists(st.text("ab c", min_size=1, max_size=3), max_size=3))
def test_text_ends_before_the_stop_string_that_is_complete_first_and_no_part_shows_any_of_it(text, stop):
    ends = [text.find(s) + len(s) for s in stop if s in text]
    seen = text[: min(ends)] if ends else text
    expected = seen[: min((seen.find(s) for s in stop if s in seen), default=len(seen))]
    answer, parts = feed(text, stop)
    assert answer.stopped == bool(ends)
    assert "".join(parts) == answer.text == expected


@pytest.mark.parametrize(("pushed", "released"), [("x EN..", "x EN."), ("x ENE", "x "), ("x END.", "x ")])
def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_decided(pushed, released):
    answer = AnswerText(Letters(), ["END"])
    assert answer.push(map(ord, pushed)) == released


@given(
    st.text("ab", max_size=9), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3), st.integers(0, 10)
)
def test_a_stop_string_complete_in_the_text_of_the_first_tokens_does_not_count(text, stop, min_tokens):
    exempt = len(text) if min_tokens >= len(text) else max(min_tokens - 1, 0)  # a letter shows one token late
    places = [(start, s) for s in stop for start in range(len(text)) if text.startswith(s, start)]
    ends = [start + len(s) for start, s in places if start + len(s) > exempt]
    expected = text
    if ends:
        expected = text[: min(start for start, s in places if start + len(s) == min(ends))]
    answer, parts = feed(text, stop, min_tokens)
    assert answer.stopped == bool(ends)
    assert "".join(parts) == answer.text == expected
