"""The growing text of one answer: never past a stop string, and never a part of one."""

from collections.abc import Iterable, Sequence
from typing import Protocol


class TokenDecoder(Protocol):
    """Turns tokens to text as they come (`tokenizer.StreamDecoder`)."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class AnswerText:
    """text: all that is known so far, cut at the first stop string. stopped: whether one was found.

    `push` and `finish` return the part that is new and final: an end that may yet turn out to begin a stop
    string is held back. A stop string counts if its last character comes after the text of the first
    `min_tokens` tokens.
    """

    def __init__(self, decoder: TokenDecoder, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._decoder = decoder
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stop = tuple(stop)
        self._longest_stop = max((len(text) for text in self._stop), default=0)
        self._num_released = 0
        self.text = ""
        self.stopped = False

    def push(self, token_ids: Iterable[int]) -> str:
        """Adds tokens one by one until a stop string appears; later ones are ignored."""
        for token in token_ids:
            if self.stopped:
                break
            self._num_tokens += 1
            self._extend(self._decoder.push(token))
        return self._release(0 if self.stopped else self._held_back())

    def finish(self) -> str:
        """No more tokens will come: the rest of the text."""
        if not self.stopped:
            self._extend(self._decoder.finish())
        return self._release(0)

    def _extend(self, new: str) -> None:
        start = len(self.text)
        self.text += new
        if self._num_tokens <= self._min_tokens:
            return
        found = [
            position
            for text in self._stop
            if (position := self.text.find(text, max(start - len(text) + 1, 0))) >= 0
        ]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _release(self, held_back: int) -> str:
        end = len(self.text) - held_back
        released = self.text[self._num_released : end]
        self._num_released = max(end, self._num_released)
        return released

    def _held_back(self) -> int:
        """Characters at the end of the text that begin a stop string."""
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(text.startswith(self.text[-length:]) for text in self._stop):
                return length
        return 0
