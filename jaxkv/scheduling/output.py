"""What a step is to compute (`SchedulerOutput`) and what came of it (`StepResult`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.request import FinishReason, Request
from jaxkv.request_table import NO_TOKEN, RequestTable


class TokenArrays(NamedTuple):
    """A step's tokens, laid end to end in the order of the output's rows. T: tokens of the step.

    tokens: int32[T], NO_TOKEN where the id is still on the device: the token that the row sampled last.
    positions: int32[T]. query_starts: int32[n + 1]. seq_lens: int32[n], this step's tokens included.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    query_starts: NDArray[np.int32]
    seq_lens: NDArray[np.int32]

    @property
    def on_device(self) -> NDArray[np.bool_]:
        """bool[T]: tokens to be taken from the device."""
        return self.tokens == NO_TOKEN


@dataclass(kw_only=True, eq=False)
class SchedulerOutput:
    """One step: n rows, those with one token first (`num_decodes` of them), each part oldest request first.

    step: number of the step, counted from 0.
    rows: int32[n], rows of the request table and the block tables. epochs: int64[n], the rows' tenants.
    num_scheduled: int32[n], tokens of each row. num_computed: int32[n], tokens computed before the step.
    samples: bool[n], the row's last known token is in the step, so a new one is sampled.
    num_drafts: int32[n], how many of each row's tokens, its last ones, are drafts: the model says after each
    of them and after the token before them what comes next. None where no row has any.
    request_ids: object[n].
    admitted, preempted, finished: ids that began to run in this step, lost their blocks in this call, or
    ended since the last call.
    """

    step: int
    rows: NDArray[np.int32]
    epochs: NDArray[np.int64]
    num_scheduled: NDArray[np.int32]
    num_computed: NDArray[np.int32]
    samples: NDArray[np.bool_]
    request_ids: NDArray[np.object_]
    num_decodes: int
    total_num_scheduled_tokens: int
    num_drafts: NDArray[np.int32] | None = None
    admitted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def sampling(self) -> NDArray[np.intp]:
        """intp[m]: indices of the rows that sample."""
        return self.samples.nonzero()[0]

    def num_scheduled_tokens(self) -> dict[str, int]:
        """Tokens by request id; for people and tests."""
        return dict(zip(self.request_ids.tolist(), self.num_scheduled.tolist(), strict=True))

    def token_arrays(self, table: RequestTable) -> TokenArrays:
        """The step's token ids and positions. Ask before the step's results are given to the scheduler."""
        n = len(self.rows)
        seq_lens = self.num_computed + self.num_scheduled
        query_starts = np.zeros(n + 1, np.int32)
        if self.num_decodes == n:
            query_starts[1:] = np.arange(1, n + 1, dtype=np.int32)
            return TokenArrays(
                table.tokens[self.rows, self.num_computed], self.num_computed, query_starts, seq_lens
            )
        np.cumsum(self.num_scheduled, out=query_starts[1:])
        first = self.num_computed - query_starts[:-1]
        positions = np.arange(query_starts[-1], dtype=np.int32) + np.repeat(first, self.num_scheduled)
        rows = np.repeat(self.rows, self.num_scheduled)
        return TokenArrays(table.tokens[rows, positions], positions, query_starts, seq_lens)

    def carried(self, previous: "SchedulerOutput | None", arrays: TokenArrays) -> NDArray[np.int32]:
        """int32[T]: for tokens still on the device, their index among those that `previous` samples; else -1.

        `previous` is the step scheduled just before this one.
        """
        carried = np.full(len(arrays.tokens), -1, np.int32)
        waiting = np.flatnonzero(arrays.on_device)
        if previous is None or not len(waiting):
            return carried
        sampled_rows = previous.rows[previous.sampling]
        index_of_row = np.full(max(int(self.rows.max()), int(sampled_rows.max())) + 1, -1, np.int32)
        index_of_row[sampled_rows] = np.arange(len(sampled_rows), dtype=np.int32)
        # A token on the device is its row's only one in the step, or the last of them.
        row_of_token = np.searchsorted(arrays.query_starts, waiting, side="right") - 1
        carried[waiting] = index_of_row[self.rows[row_of_token]]
        return carried


class FinishedRequest(NamedTuple):
    """A request that ended in a step."""

    request: Request
    reason: FinishReason


@dataclass(kw_only=True, eq=False)
class StepResult:
    """The tokens a step gave to requests that still wanted them: m of them, in the order of the step's rows.

    A row whose drafts were confirmed has several, one after the other.
    indices: intp[m], positions in the output's rows. token_ids: int32[m]. num_output_tokens: int64[m],
    tokens of the answer so far. request_ids: object[m]. finished: requests that these tokens ended.
    """

    indices: NDArray[np.intp]
    token_ids: NDArray[np.int32]
    num_output_tokens: NDArray[np.int64]
    request_ids: NDArray[np.object_]
    finished: tuple[FinishedRequest, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def joined(cls, parts: Sequence["StepResult"]) -> "StepResult":
        """The first tokens of all rows, then the second ones..., in one: row by row."""
        indices = np.concatenate([part.indices for part in parts])
        order = np.argsort(indices, kind="stable")
        return cls(
            indices=indices[order],
            token_ids=np.concatenate([part.token_ids for part in parts])[order],
            num_output_tokens=np.concatenate([part.num_output_tokens for part in parts])[order],
            request_ids=np.concatenate([part.request_ids for part in parts])[order],
            finished=tuple(ended for part in parts for ended in part.finished),
        )

    def new_tokens(self) -> Iterator[tuple[str, int]]:
        """Pairs of request id and its new token."""
        return zip(self.request_ids.tolist(), self.token_ids.tolist(), strict=True)
