"""Text to token ids and back, on top of `sentencepiece` (GGUF vocabularies) or `tokenizers`
(tokenizer.json)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2 as sentencepiece_proto

from jaxkv.errors import JaxkvError

# How a token is used, as GGUF and SentencePiece number it.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# SentencePiece writes a space as this character.
SPACE = "\u2581"
# What decoding writes for bytes that are not, or not yet, a whole character.
REPLACEMENT = "\ufffd"
# Tokens whose text a stream holds back before it looks for some that no later token can change.
MAX_HELD_TOKENS = 8
# Tokens whose text a stream holds back at most: bytes without end that are no character are given out then.
MOST_HELD_TOKENS = 64
# Tokens that the beginning of a character takes at most.
UNFINISHED_TOKENS = 3


class _Backend(Protocol):
    """What this module needs of a tokenizer library."""

    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Tokenizer:
    """A model's tokenizer.

    bos_token_id: put before every encoded text; None: nothing is.
    special_token_ids: recognised in text ("<start_of_turn>"), left out of decoded text.
    """

    def __init__(self, backend: _Backend, bos_token_id: int | None, special_token_ids: frozenset[int]):
        self._backend = backend
        self.bos_token_id = bos_token_id
        self.special_token_ids = special_token_ids
        self.vocab_size = backend.vocab_size

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """The token ids of `text`, after the token for the beginning unless `add_bos` is False."""
        ids = self._backend.encode(text)
        return [self.bos_token_id, *ids] if add_bos and self.bos_token_id is not None else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens; bytes that are no character become U+FFFD."""
        return self._backend.decode([i for i in map(int, ids) if i not in self.special_token_ids])


class StreamDecoder:
    """Decodes tokens as they come. The pieces, `finish()` included, join to what `decode` gives for all of
    them (`tokenizers` may decode bytes that are no character otherwise once more of them are there).

    Text is held back while it ends in an unfinished character. Each time decoding starts at the last tokens
    given out, so a token costs the same however long the text, and a space that a tokenizer drops at the
    start of a text is not lost in its middle.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the last tokens given out, then those held back
        self._num_shown = 0  # how many of _ids were given out

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that is new and certain, often empty."""
        if token_id in self._tokenizer.special_token_ids:
            return ""
        self._ids.append(token_id)
        end = self._num_certain()
        if end == self._num_shown:
            return ""
        new = self._text(end)
        self._ids = self._ids[self._num_shown :]
        self._num_shown = end - self._num_shown
        return new

    def finish(self) -> str:
        """The text held back at the end."""
        new = self._text(len(self._ids))
        self._num_shown = len(self._ids)
        return new

    def _num_certain(self) -> int:
        """How many of _ids have text that no later token changes.

        All of them, unless they end in bytes that are no character. These may be the beginning of one, which
        takes up to three tokens; where many are held back, the ones before are given out as they are: as
        soon as decoding them apart changes nothing, in the end all the same.
        """
        held = len(self._ids) - self._num_shown
        whole = self._tokenizer.decode(self._ids)
        if not whole.endswith(REPLACEMENT):
            return len(self._ids)
        if held > MAX_HELD_TOKENS:
            last = len(self._ids) - UNFINISHED_TOKENS
            for end in range(last, self._num_shown, -1):
                if self._tokenizer.decode(self._ids[:end]) + self._tokenizer.decode(self._ids[end:]) == whole:
                    return end
            if held > MOST_HELD_TOKENS:
                return last
        return self._num_shown

    def _text(self, end: int) -> str:
        shown = self._tokenizer.decode(self._ids[: self._num_shown])
        return self._tokenizer.decode(self._ids[:end])[len(shown) :]


class _SentencePieceBackend:
    def __init__(self, model: bytes):
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._processor.GetPieceSize()

    def encode(self, text: str) -> list[int]:
        return self._processor.EncodeAsIds(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.DecodeIds(list(ids))


class _HuggingFaceBackend:
    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def tokenizer_from_vocabulary(
    tokens: Sequence[str],
    scores: Sequence[float] | np.ndarray,
    types: Sequence[int] | np.ndarray,
    *,
    bos_token_id: int | None,
    unknown_token_id: int,
    add_space_prefix: bool,
) -> Tokenizer:
    """A SentencePiece BPE tokenizer from a GGUF file's lists. JaxkvError where they are of different lengths.

    Control tokens are matched in text like user-defined ones, as Hugging Face's tokenizers do: prompts are
    written with "<start_of_turn>". GGUF writes the runs of spaces among user-defined tokens as plain spaces.
    """
    if not len(tokens) == len(scores) == len(types):
        raise JaxkvError(
            f"the vocabulary has {len(tokens)} tokens, {len(scores)} scores and {len(types)} types; "
            "they must be as many"
        )
    if not 0 <= unknown_token_id < len(tokens):
        raise JaxkvError(f"unknown token id {unknown_token_id} is outside the vocabulary of {len(tokens)}")
    proto = sentencepiece_proto.ModelProto()  # pyright: ignore[reportAttributeAccessIssue] (made on import)
    special = set()
    for index, (token, score, kind) in enumerate(
        zip(tokens, np.asarray(scores).tolist(), np.asarray(types).tolist(), strict=True)
    ):
        if kind == CONTROL:
            special.add(index)
        if kind in (CONTROL, USER_DEFINED):
            token, kind = token.replace(" ", SPACE), USER_DEFINED
        if index == unknown_token_id:
            kind = UNKNOWN
        proto.pieces.add(piece=token, score=score, type=kind)
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.trainer_spec.byte_fallback = BYTE in types
    proto.trainer_spec.unk_id = unknown_token_id
    proto.trainer_spec.unk_surface = ""
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = add_space_prefix
    proto.normalizer_spec.remove_extra_whitespaces = False
    try:
        backend = _SentencePieceBackend(proto.SerializeToString())
    except (RuntimeError, ValueError) as error:
        raise JaxkvError(f"the vocabulary does not make a SentencePiece model: {error}") from None
    return Tokenizer(backend, bos_token_id, frozenset(special))


def tokenizer_from_json(path: Path, bos_token: str | None) -> Tokenizer:
    """The tokenizer of a tokenizer.json. JaxkvError where the file is missing, unreadable, or lacks
    `bos_token`."""
    if not path.is_file():
        raise JaxkvError(f"there is no file {path}")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise JaxkvError(f"cannot read {path}: {error}") from None
    bos_token_id = None if bos_token is None else tokenizer.token_to_id(bos_token)
    if bos_token is not None and bos_token_id is None:
        raise JaxkvError(f"{path} has no token {bos_token!r}, the beginning of a text")
    special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return Tokenizer(_HuggingFaceBackend(tokenizer), bos_token_id, special)
