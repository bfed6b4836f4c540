"""The tokens and counters of all running requests, as arrays with one row a request.

A step reads and extends every row with a few numpy calls, so its cost does not depend on Python objects.
Rows are numbered by the cache manager: the same number is the request's row in its block tables.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jaxkv.arrays import grown
from jaxkv.errors import JaxkvError

if TYPE_CHECKING:
    from jaxkv.request import Request

_COLUMNS = (
    "num_tokens",
    "num_placeholders",
    "num_drafts",
    "num_computed",
    "num_prompt",
    "max_total",
    "epoch",
    "prefilling",
    "last_step",
)

NO_TOKEN = -1
"""Stands where a token is scheduled but its id has not come back from the device; also pads `end_tokens`."""


class RequestTable:
    """Struct of arrays over rows; a row is live from `open_row` to `close_row`.

    tokens: int32[rows, capacity], valid up to num_tokens + num_drafts + num_placeholders of the row.
    num_tokens: int64[rows], known tokens.
    num_drafts: int64[rows], tokens after the known ones that a draft model proposes.
    num_placeholders: int64[rows], tokens after these that scheduled steps will produce.
    num_computed: int64[rows], tokens computed once all scheduled steps have run.
    num_prompt: int64[rows]. max_total: int64[rows], prompt and answer together may not be longer.
    end_tokens: int32[rows, widest set], padded with NO_TOKEN.
    epoch: int64[rows], different for every tenant of a row and 0 where there is none or it has ended, so
      that a late result does not reach a successor.
    prefilling: bool[rows], some of the tokens known at admission are not scheduled yet.
    last_step: int64[rows], number of the last step that scheduled the row; -1 before the first.
    request_ids: object[rows], the tenant's id.

    Rows and columns grow by doubling; an array read before a growth is a stale copy after it.
    """

    def __init__(self, num_rows: int = 16, capacity: int = 256) -> None:
        self.tokens: NDArray[np.int32] = np.empty((num_rows, capacity), np.int32)
        self.num_tokens: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.num_placeholders: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.num_drafts: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.num_computed: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.num_prompt: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.max_total: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.end_tokens: NDArray[np.int32] = np.full((num_rows, 1), NO_TOKEN, np.int32)
        self.epoch: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.prefilling: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.last_step: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.request_ids: NDArray[np.object_] = np.full(num_rows, None, np.object_)
        self._requests: list[Request | None] = [None] * num_rows
        self._next_epoch = 1

    @property
    def num_rows(self) -> int:
        return len(self._requests)

    @property
    def capacity(self) -> int:
        """Tokens a row can hold before the table grows."""
        return self.tokens.shape[1]

    def request(self, row: int) -> "Request":
        """The tenant of a live row. A steady decode step never calls this."""
        request = self._requests[row]
        if request is None:
            raise JaxkvError(f"row {row} holds no request")
        return request

    def is_live(self, row: int) -> bool:
        return row < self.num_rows and self._requests[row] is not None

    def open_row(self, row: int, tokens: NDArray[np.int32], request: "Request") -> None:
        """Makes `request` the tenant of `row` with these known tokens (copied)."""
        if self.is_live(row):
            raise JaxkvError(f"row {row} already holds request {self.request(row).request_id!r}")
        self._grow_rows(row + 1)
        self.reserve_columns(len(tokens) + 1)
        self._grow_end_tokens(len(request.end_token_ids))
        self.tokens[row, : len(tokens)] = tokens
        self.num_tokens[row] = len(tokens)
        self.num_placeholders[row] = 0
        self.num_drafts[row] = 0
        self.num_computed[row] = 0
        self.num_prompt[row] = request.num_prompt_tokens
        self.max_total[row] = request.max_total_tokens
        self.end_tokens[row] = NO_TOKEN
        self.end_tokens[row, : len(request.end_token_ids)] = request.end_token_ids
        self.epoch[row] = self._next_epoch
        self._next_epoch += 1
        self.prefilling[row] = True
        self.last_step[row] = -1
        self.request_ids[row] = request.request_id
        self._requests[row] = request

    def retire_row(self, row: int) -> None:
        """The tenant takes no more results, though it keeps the row until `close_row`."""
        self.epoch[row] = 0
        self.num_placeholders[row] = 0

    def close_row(self, row: int) -> None:
        """Ends the tenancy."""
        self.request(row)
        self.retire_row(row)
        self._requests[row] = None
        self.request_ids[row] = None

    def append_to_row(self, row: int, token_ids: NDArray[np.int32]) -> None:
        """Adds known tokens to one row. Raises JaxkvError while the row waits for a token from the device."""
        if self.num_placeholders[row]:
            raise JaxkvError(
                f"row {row} waits for {int(self.num_placeholders[row])} tokens of scheduled steps: tokens "
                "cannot be appended out of order"
            )
        start = int(self.num_tokens[row])
        self.reserve_columns(start + len(token_ids) + 1)
        self.tokens[row, start : start + len(token_ids)] = token_ids
        self.num_tokens[row] = start + len(token_ids)
        self.num_drafts[row] = 0

    def add_placeholders(self, rows: NDArray[np.integer]) -> None:
        """Each row is to get one more token, from a step just scheduled."""
        positions = self.num_tokens[rows] + self.num_drafts[rows] + self.num_placeholders[rows]
        if len(rows):
            self.reserve_columns(int(np.maximum.reduce(positions)) + 1)
        self.tokens[rows, positions] = NO_TOKEN
        self.num_placeholders[rows] += 1

    def fill_placeholders(self, rows: NDArray[np.integer], token_ids: NDArray[np.int32]) -> None:
        """The oldest missing token of each row has arrived."""
        positions = self.num_tokens[rows]
        self.tokens[rows, positions] = token_ids
        self.num_tokens[rows] = positions + 1
        self.num_placeholders[rows] -= 1

    def put_drafts(self, row: int, token_ids: NDArray[np.int32]) -> None:
        """Proposes what follows the row's known tokens, in place of any earlier proposal."""
        start = int(self.num_tokens[row])
        self.reserve_columns(start + len(token_ids) + 1)
        self.tokens[row, start : start + len(token_ids)] = token_ids
        self.num_drafts[row] = len(token_ids)

    def drafts(self, rows: NDArray[np.integer], most: int) -> NDArray[np.int32]:
        """int32[n, most]: what each row's drafts are, NO_TOKEN where it has fewer."""
        places = np.arange(most)
        positions = np.minimum(self.num_tokens[rows, None] + places, self.capacity - 1)
        return np.where(places < self.num_drafts[rows, None], self.tokens[rows[:, None], positions], NO_TOKEN)

    def ends_at(self, rows: NDArray[np.integer], token_ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """bool[n]: whether the token is one of its row's end tokens."""
        if self.end_tokens.shape[1] == 1:
            return self.end_tokens[rows, 0] == token_ids
        return (self.end_tokens[rows] == token_ids[:, None]).any(axis=1)

    def reserve_columns(self, num_tokens: int) -> None:
        """Makes room for rows of `num_tokens` tokens."""
        if num_tokens > self.capacity:
            self.tokens = grown(self.tokens, (self.num_rows, max(num_tokens, 2 * self.capacity)), None)

    def _grow_end_tokens(self, width: int) -> None:
        if width > self.end_tokens.shape[1]:
            self.end_tokens = grown(self.end_tokens, (self.num_rows, width), NO_TOKEN)

    def _grow_rows(self, num_rows: int) -> None:
        if num_rows <= self.num_rows:
            return
        num_rows = max(num_rows, 2 * self.num_rows)
        self.tokens = grown(self.tokens, (num_rows, self.capacity), None)
        self.end_tokens = grown(self.end_tokens, (num_rows, self.end_tokens.shape[1]), NO_TOKEN)
        for name in _COLUMNS:
            setattr(self, name, grown(getattr(self, name), (num_rows,)))
        self.request_ids = grown(self.request_ids, (num_rows,), None)
        self._requests.extend([None] * (num_rows - len(self._requests)))
