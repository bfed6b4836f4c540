"""Requests without tokens: the scheduler counts them, the trace knows what they would hash to."""

import numpy as np
from numpy.typing import NDArray

from jaxkv.hashing import BlockHasher
from jaxkv.lab.content import HashCache
from jaxkv.lab.trace import TraceRequest
from jaxkv.request import Request
from jaxkv.request_table import RequestTable

_NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)


class ReplayRequest(Request):
    """A request of a trace. serial: its number there; requests are served in this order.

    Its answer is as long as the trace says. All its hashes, the answer's too, are worked out at once.
    num_computed_before: tokens it had computed when it last gave up its blocks.
    """

    def __init__(self, traced: TraceRequest, serial: int, cache: HashCache) -> None:
        super().__init__(str(serial), [0], traced.num_output_tokens, arrival=serial)
        self.traced = traced
        self.serial = serial
        self.num_prompt_tokens = traced.num_prompt_tokens
        self.max_total_tokens = traced.num_prompt_tokens + traced.num_output_tokens
        self._num_tokens = traced.num_prompt_tokens
        self._tokens = _NO_TOKENS
        self._cache = cache
        self.num_computed_before = 0
        self._all_hashes: list[bytes] = []

    def block_hashes(self, hasher: BlockHasher) -> list[bytes]:
        hashes, needed = self._block_hashes, hasher.num_hash_blocks(self.num_tokens)
        if len(hashes) < needed:
            if not self._all_hashes:
                total = hasher.num_hash_blocks(self.max_total_tokens)
                self._all_hashes = self.traced.content.hashes(hasher, self._cache, self.serial, total)
            hashes.extend(self._all_hashes[len(hashes) : needed])
        return hashes

    def bind(self, table: RequestTable, row: int) -> None:
        super().bind(table, row)
        table.num_tokens[row] = self._num_tokens

    def unbind(self) -> None:
        if self._table is None:
            return
        table, row = self._table, self._row
        self._num_tokens, self._num_computed_tokens = self.num_tokens, self.num_computed_tokens
        self._table, self._row = None, -1
        table.close_row(row)


class CountingTable(RequestTable):
    """Counts the tokens of its rows and keeps none of them."""

    def reserve_columns(self, num_tokens: int) -> None:
        """Nothing to keep."""

    def add_placeholders(self, rows: NDArray[np.integer]) -> None:
        self.num_placeholders[rows] += 1

    def fill_placeholders(self, rows: NDArray[np.integer], token_ids: NDArray[np.int32]) -> None:
        self.num_tokens[rows] += 1
        self.num_placeholders[rows] -= 1
