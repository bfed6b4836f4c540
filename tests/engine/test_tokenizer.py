"""Tokenizers against an independent implementation, and streams that never show half a character."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.engine.loading.gguf_file import GGUFFile
from jaxkv.engine.loading.gguf_model import read_tokenizer
from jaxkv.engine.loading.packaged import gemma3_270m
from jaxkv.engine.tokenizer import (
    MOST_HELD_TOKENS,
    REPLACEMENT,
    StreamDecoder,
    Tokenizer,
    tokenizer_from_json,
    tokenizer_from_vocabulary,
)
from jaxkv.errors import JaxkvError
from scripts.make_tiny_checkpoint import SPECIAL_TOKENS, byte_tokenizer
from tests.engine.loading.files import vocabulary
from tests.models.golden import FOLDER

FIRST_BYTE = len(SPECIAL_TOKENS)
KNOWN = json.loads((FOLDER / "gemma3_tokens.json").read_text())


@pytest.fixture(scope="module")
def gemma() -> Tokenizer:
    path = gemma3_270m()
    return read_tokenizer(GGUFFile(path).metadata, path)


@pytest.fixture(scope="module", params=["sentencepiece", "tokenizers"])
def byte_level(request, tmp_path_factory) -> Tokenizer:
    """One token a byte, by either library: ids are FIRST_BYTE + byte."""
    if request.param == "tokenizers":
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        byte_tokenizer().save(str(path))
        return tokenizer_from_json(path, "<bos>")
    return tokenizer_from_vocabulary(
        *vocabulary(), bos_token_id=2, unknown_token_id=3, add_space_prefix=False
    )


@pytest.mark.parametrize("text", KNOWN)
def test_gemma_ids_equal_transformers_conversion(gemma, text):
    assert gemma.encode(text, add_bos=False) == KNOWN[text]


@pytest.mark.parametrize("text", [text for text in KNOWN if "<" not in text and "▁" not in text])
def test_gemma_text_comes_back(gemma, text):
    assert gemma.decode(gemma.encode(text)) == text


def test_encoding_begins_with_bos_and_decoding_drops_special_tokens(gemma):
    ids = gemma.encode("<start_of_turn>user\nhi<end_of_turn>")
    assert ids[:2] == [2, 105]
    assert ids[-1] == 106
    assert gemma.decode(ids) == "user\nhi"


@given(st.text(max_size=40))
def test_gemma_stream_joins_to_the_whole_text(gemma, text):
    ids = gemma.encode(text)
    stream = StreamDecoder(gemma)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.finish() == gemma.decode(ids)


def as_bytes(byte_level: Tokenizer, text: str) -> list[int]:
    ids = byte_level.encode(text, add_bos=False)
    assert ids == [FIRST_BYTE + byte for byte in text.encode()]
    return ids


def test_a_character_is_shown_when_its_last_byte_comes(byte_level):
    stream = StreamDecoder(byte_level)
    shown = [stream.push(i) for i in as_bytes(byte_level, "aé🤖b")]
    assert shown == ["a", "", "é", "", "", "", "🤖", "b"]


def test_an_unfinished_character_is_shown_at_the_end(byte_level):
    stream = StreamDecoder(byte_level)
    assert [stream.push(i) for i in as_bytes(byte_level, "x🤖")[:-1]] == ["x", "", "", ""]
    assert set(stream.finish()) == {REPLACEMENT}
    assert stream.finish() == ""


def test_special_tokens_in_a_stream_show_nothing(byte_level):
    stream = StreamDecoder(byte_level)
    assert [stream.push(i) for i in (2, FIRST_BYTE + ord("x"), 5)] == ["", "x", ""]
    assert stream.finish() == ""


@given(st.text(st.characters(exclude_characters=" ▁<", exclude_categories=["Cs"]), max_size=20))
def test_characters_in_bytes_stream_to_the_text(byte_level, text):
    stream = StreamDecoder(byte_level)
    pieces = [stream.push(i) for i in as_bytes(byte_level, text)]
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == text


@pytest.mark.parametrize("byte_level", ["sentencepiece"], indirect=True)
@given(st.lists(st.integers(FIRST_BYTE, FIRST_BYTE + 255), max_size=40))
def test_any_bytes_stream_to_what_decoding_them_gives(byte_level, ids):
    stream = StreamDecoder(byte_level)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.finish() == byte_level.decode(ids)


def test_bytes_that_are_never_a_character_are_shown_in_the_end(byte_level):
    stream = StreamDecoder(byte_level)
    shown = "".join(stream.push(FIRST_BYTE + 0xFF) for _ in range(100))
    assert len(shown) > 80


class Undecided:
    """A tokenizer whose text of many tokens is never that of its parts."""

    special_token_ids = frozenset()

    def decode(self, ids):
        return f"{len(ids)}{REPLACEMENT}"


def test_a_stream_holds_back_only_so_many_tokens():
    stream = StreamDecoder(Undecided())  # pyright: ignore[reportArgumentType]
    for token in range(1000):
        stream.push(token)
        assert len(stream._ids) <= 2 * MOST_HELD_TOKENS


def test_a_space_prefix_is_added_where_the_vocabulary_asks_for_it():
    tokens, scores, types = vocabulary()
    tokens, scores, types = [*tokens, "▁a", "a"], [*scores, -1.0, -2.0], [*types, 1, 1]
    options = {"bos_token_id": None, "unknown_token_id": 3}
    with_prefix = tokenizer_from_vocabulary(tokens, scores, types, add_space_prefix=True, **options)
    without = tokenizer_from_vocabulary(tokens, scores, types, add_space_prefix=False, **options)
    assert with_prefix.encode("a")[-1] in (len(tokens) - 2, len(tokens) - 1)
    assert without.encode("a") == [len(tokens) - 1]
    assert with_prefix.decode(with_prefix.encode("a")) == "a"


def test_refusals(tmp_path):
    tokens, scores, types = vocabulary()
    options = {"bos_token_id": 2, "add_space_prefix": False}
    with pytest.raises(JaxkvError, match="262 tokens, 261 scores and 262 types"):
        tokenizer_from_vocabulary(tokens, scores[1:], types, unknown_token_id=3, **options)
    with pytest.raises(JaxkvError, match="unknown token id 300 is outside the vocabulary of 262"):
        tokenizer_from_vocabulary(tokens, scores, types, unknown_token_id=300, **options)
    with pytest.raises(JaxkvError, match="does not make a SentencePiece model"):
        tokenizer_from_vocabulary(["x"] * len(tokens), scores, types, unknown_token_id=3, **options)
    with pytest.raises(JaxkvError, match=r"no file .*tokenizer\.json"):
        tokenizer_from_json(tmp_path / "tokenizer.json", "<bos>")
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(JaxkvError, match=r"has no token '<s>'"):
        tokenizer_from_json(tmp_path / "tokenizer.json", "<s>")
