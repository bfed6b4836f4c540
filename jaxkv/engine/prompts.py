"""From what a user gives as prompts to token ids, all of them checked before any is queued."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from jaxkv.engine.tokenizer import Tokenizer
from jaxkv.errors import JaxkvError
from jaxkv.request import as_token_ids
from jaxkv.unicode_text import check_unicode

PromptLike = str | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as token ids, and the text it was made from where there is one."""

    token_ids: Sequence[int]
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class PromptReader:
    """Reads prompts for one model.

    vocab_size: token ids are below it. max_model_len: tokens of a prompt and its answer together.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int

    def read(self, prompts: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
        """One prompt or several, text or token ids each. JaxkvError names the first that cannot be served."""
        return [self._read(f"prompt {number}", prompt) for number, prompt in enumerate(_as_list(prompts))]

    def _read(self, name: str, prompt: Any) -> Prompt:
        text = None
        if isinstance(prompt, str):
            check_unicode(name, prompt)
            text, prompt = prompt, self.tokenizer.encode(prompt)
        if not _is_list(prompt):
            raise JaxkvError(f"{name} must be text or a list of token ids, not {prompt!r}")
        ids = as_token_ids(prompt, name)
        if (highest := int(ids.max())) >= self.vocab_size:
            raise JaxkvError(
                f"token id {highest} of {name} is not in the vocabulary of {self.vocab_size} tokens"
            )
        if len(ids) >= self.max_model_len:
            raise JaxkvError(
                f"{name} of {len(ids)} tokens is too long: prompt and answer together may have "
                f"{self.max_model_len} tokens (max_model_len)"
            )
        return Prompt(token_ids=ids.tolist(), text=text)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or several, as a list. A list of integers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise JaxkvError(f"prompts must be text, token ids or a list of such, not {prompts!r}")
    if len(prompts) and all(isinstance(item, Integral) for item in prompts):
        return [prompts]
    return list(prompts)
