"""One request: its tokens, its limits, and how far it has come.

While a request runs, its tokens live in a row of a `RequestTable`, beside those of all other running
requests, so that a step can extend every row at once. While it waits they live here. Readers need not know.
"""

import enum
import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from jaxkv.checks import check_all, check_int, check_is
from jaxkv.errors import JaxkvError
from jaxkv.hashing import BlockHasher
from jaxkv.unicode_text import check_unicode

if TYPE_CHECKING:
    from jaxkv.hits import PrefixHit
    from jaxkv.request_table import RequestTable

FinishReason = Literal["stop", "length", "abort"]

MAX_TOKEN_ID = int(np.iinfo(np.int32).max)
UNLIMITED = 2**31
"""Stands for no limit on the answer."""


class RequestStatus(enum.Enum):
    """Where a request is. Those after RUNNING are final."""

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    PREEMPTED = enum.auto()
    RUNNING = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended, or None while it lives."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
}


@dataclass(frozen=True, kw_only=True)
class MultimodalInput:
    """An image or the like: prompt tokens [offset, offset + length) stand for the content `identifier`."""

    identifier: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        check_unicode("identifier of a multimodal input", self.identifier)
        check_int("offset of a multimodal input", self.offset, 0)
        check_int("length of a multimodal input", self.length, 1)


@dataclass(frozen=True, kw_only=True)
class EncoderInput:
    """What an encoder reads for a request: `length` tokens of its output, of the content `identifier`."""

    identifier: str
    length: int

    def __post_init__(self) -> None:
        check_unicode("identifier of an encoder input", self.identifier)
        check_int("length of an encoder input", self.length, 1)


def as_token_ids(token_ids: Sequence[int] | NDArray, name: str = "prompt_token_ids") -> NDArray[np.int32]:
    """A fresh int32[n] of the token ids. JaxkvError for an empty list, a non-integer or a negative id."""
    try:
        array = np.asarray(token_ids)
    except (ValueError, OverflowError) as error:  # lists of different lengths
        raise JaxkvError(f"{name} must be a list of token ids: {error}") from None
    if array.ndim != 1 or array.size == 0:
        raise JaxkvError(f"{name} must be a list of at least one token id, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise JaxkvError(f"{name} must be integers, got dtype {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > MAX_TOKEN_ID:
        raise JaxkvError(
            f"{name} must lie in [0, {MAX_TOKEN_ID}], got {low if low < 0 else high} "
            f"at position {int(array.argmin() if low < 0 else array.argmax())}"
        )
    return np.array(array, dtype=np.int32)


class Request:
    """A prompt to continue by at most `max_tokens` tokens.

    request_id: unique among live requests, not empty. prompt_token_ids: int32[n], n >= 1.
    max_tokens: None means as many as the model allows. end_token_ids: tokens that end the answer.
    arrival: sort key of the waiting queue (a time, a step...); None: the order of `add_request`.
    priority: lower is served first, before arrival is looked at.
    encoder_input: what layers of cross attention read. It shapes every cache entry of the decoder, so it
    counts as one more multimodal input, at the first token.
    cache_salt, lora_name, multimodal_inputs: requests share cached blocks only where all of these agree.
    Raises JaxkvError for what no step could serve, so that a bad request never gets as far as a queue.

    max_total_tokens: prompt and answer together; a scheduler lowers it to the model's maximum.
    num_preemptions counts how often the request lost its blocks. num_cached_tokens is the hit of its first
    admission, None before that; num_cached_tokens_on_resume sums the hits of admissions after a preemption.
    num_external_tokens: how many of these a connector brought. prefix_hit: what its first admission found in
    the cache, None before that.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | NDArray,
        max_tokens: int | None = None,
        *,
        arrival: float | None = None,
        priority: int = 0,
        end_token_ids: Sequence[int] = (),
        cache_salt: str | None = None,
        lora_name: str | None = None,
        multimodal_inputs: Sequence[MultimodalInput] = (),
        encoder_input: EncoderInput | None = None,
    ) -> None:
        check_unicode("request_id", request_id)
        if not request_id:
            raise JaxkvError("request_id must not be empty")
        self._tokens = as_token_ids(prompt_token_ids)
        if max_tokens is not None:
            check_int("max_tokens", max_tokens, 1)
        ends = []
        if not isinstance(end_token_ids, Sized) or len(end_token_ids):
            ends = as_token_ids(end_token_ids, "end_token_ids").tolist()
        for name, value in (("arrival", 0 if arrival is None else arrival), ("priority", priority)):
            if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
                raise JaxkvError(f"{name} must be a finite number, not {value!r}")
        for name, text in (("cache_salt", cache_salt), ("lora_name", lora_name)):
            if text is not None:
                check_unicode(name, text)
        if encoder_input is not None:
            check_is("encoder_input", encoder_input, EncoderInput)
        check_all("multimodal_inputs", multimodal_inputs, MultimodalInput)
        for item in multimodal_inputs:
            if item.offset + item.length > len(self._tokens):
                raise JaxkvError(
                    f"multimodal input {item.identifier!r} ends at token {item.offset + item.length} of a "
                    f"prompt of {len(self._tokens)} tokens"
                )
        self.request_id = request_id
        self.num_prompt_tokens = len(self._tokens)
        self.max_tokens = max_tokens
        self.max_total_tokens = self.num_prompt_tokens + (UNLIMITED if max_tokens is None else max_tokens)
        self.arrival = arrival
        self.priority = priority
        self.end_token_ids = tuple(ends)
        self.cache_salt = cache_salt
        self.lora_name = lora_name
        self.multimodal_inputs = tuple(multimodal_inputs)
        self.num_encoder_tokens = 0
        if encoder_input is not None:
            self.num_encoder_tokens = encoder_input.length
            read_by_all = MultimodalInput(
                identifier=f"encoder:{encoder_input.identifier}", offset=0, length=1
            )
            self.multimodal_inputs += (read_by_all,)
        self.status = RequestStatus.WAITING
        self.num_preemptions = 0
        self.num_cached_tokens: int | None = None
        self.num_cached_tokens_on_resume = 0
        self.num_external_tokens = 0
        self.prefix_hit: PrefixHit | None = None
        self._num_tokens = len(self._tokens)
        self._num_computed_tokens = 0
        self._block_hashes: list[bytes] = []
        self._hasher: BlockHasher | None = None
        self._table: RequestTable | None = None
        self._row = -1

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt {self.num_prompt_tokens}, known "
            f"{self.num_tokens}, computed {self.num_computed_tokens})"
        )

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and every generated token whose id has arrived."""
        return self._num_tokens if self._table is None else int(self._table.num_tokens[self._row])

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose cache content is computed, or will be by steps already scheduled."""
        return self._num_computed_tokens if self._table is None else int(self._table.num_computed[self._row])

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        if self._table is None:
            self._num_computed_tokens = value
        else:
            self._table.num_computed[self._row] = value

    def token_ids(self, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        """Known tokens [start, stop) as a read-only int32 view; `stop` beyond the known tokens is clipped."""
        known = self.num_tokens
        stop = known if stop is None else min(stop, known)
        tokens = self._tokens if self._table is None else self._table.tokens[self._row]
        view = tokens[start:stop]
        view.flags.writeable = False
        return view

    @property
    def prompt_token_ids(self) -> NDArray[np.int32]:
        """int32[num_prompt_tokens]."""
        return self.token_ids(0, self.num_prompt_tokens)

    @property
    def output_token_ids(self) -> NDArray[np.int32]:
        """int32[num_output_tokens]: the generated tokens so far."""
        return self.token_ids(self.num_prompt_tokens)

    @property
    def row(self) -> int | None:
        """The request's row in the tables of running requests, or None where it has none."""
        return None if self._table is None else self._row

    @property
    def is_finished(self) -> bool:
        return self.status.finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.status.finish_reason

    def append_tokens(self, token_ids: Sequence[int] | NDArray) -> None:
        """Adds generated tokens to this one request. A scheduler's step extends all rows at once instead."""
        new = as_token_ids(token_ids, "token_ids")
        if self._table is not None:
            self._table.append_to_row(self._row, new)
            return
        stop = self._num_tokens + len(new)
        if stop > len(self._tokens):
            grown = np.empty(max(stop, 2 * len(self._tokens)), dtype=np.int32)
            grown[: self._num_tokens] = self._tokens[: self._num_tokens]
            self._tokens = grown
        self._tokens[self._num_tokens : stop] = new
        self._num_tokens = stop

    def block_hashes(self, hasher: BlockHasher) -> list[bytes]:
        """The hash of every full hash block of the known tokens, oldest first.

        Computed once and extended when asked. The list is the request's own: read it, do not change it.
        """
        if hasher is not self._hasher:
            self._hasher, self._block_hashes = hasher, []
        hashes = self._block_hashes
        full = hasher.num_hash_blocks(self.num_tokens)
        if len(hashes) < full:
            hashes.extend(hasher.hash_blocks(self, len(hashes), full, hashes[-1] if hashes else None))
        return hashes

    def bind(self, table: "RequestTable", row: int) -> None:
        """Moves the tokens into row `row` of the table, which from now on is their only home."""
        if self._table is not None:
            raise JaxkvError(f"request {self.request_id!r} is already in row {self._row}")
        table.open_row(row, self._tokens[: self._num_tokens], self)
        table.num_computed[row] = self._num_computed_tokens
        self._table, self._row = table, row

    def unbind(self) -> None:
        """Takes the tokens back from the table; does nothing for a request that is in no row."""
        if self._table is None:
            return
        table, row = self._table, self._row
        self._num_tokens = self.num_tokens
        self._num_computed_tokens = self.num_computed_tokens
        self._tokens = table.tokens[row, : self._num_tokens].copy()
        self._table, self._row = None, -1
        table.close_row(row)
