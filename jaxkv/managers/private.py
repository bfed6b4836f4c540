"""Units that belong to one request and are never shared: the encoder's keys and values, scratch rings."""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxkv.arrays import grown
from jaxkv.managers.base import NEVER, Filled, Finder, HitPart, Manager, ManagerContext, Span
from jaxkv.pool import Units
from jaxkv.specs import KVCacheSpec, cdiv


class PrivateManager(Manager):
    """Takes all units of a request when it starts and gives them back when it ends.

    ids: int32[width, rows, table_width]. count: int64[rows].
    """

    def __init__(
        self,
        context: ManagerContext,
        spec: KVCacheSpec,
        group_ids: Sequence[int],
        blocks_per_state: int,
        is_eagle: bool,
    ) -> None:
        super().__init__(context, spec, group_ids, blocks_per_state, is_eagle)
        self.ids: NDArray[np.int32] = np.zeros((self.width, 0, 1), np.int32)
        self.count: NDArray[np.int64] = np.zeros(0, np.int64)

    @abstractmethod
    def units_for(self, span: Span) -> int:
        """Units a request takes when it starts."""

    @property
    def gives_back(self) -> bool:
        return False

    def grow_rows(self, num_rows: int) -> None:
        self.ids = grown(self.ids, (self.width, num_rows, self.ids.shape[2]))
        self.count = grown(self.count, (num_rows,))

    def open_row(self, row: int, part: HitPart, span: Span) -> None:
        self.count[row] = 0

    def close_row(self, row: int) -> Units:
        leaders = self.units_of(row)[::-1].astype(np.intp)
        self.count[row] = 0
        return Units(leaders, range(-len(leaders) * self.block_size, 0, self.block_size))

    def units_of(self, row: int) -> NDArray[np.int32]:
        return self.ids[0, row, : self.count[row]]

    def positional_ids(self, row: int) -> list[list[int]]:
        return self.ids[:: self.blocks_per_state, row, : self.count[row]].tolist()

    def release_skipped(self, row: int, computed: int) -> None:
        """Nothing is let go of before the request ends."""

    def trim(self, part: HitPart, computed: int) -> HitPart:
        return part

    def units_needed(self, row: int, part: HitPart, span: Span) -> int:
        return self.units_for(span) if row < 0 else 0

    def extend(self, row: int, num_units: int, span: Span) -> None:
        if num_units > self.ids.shape[2]:
            self.ids = grown(self.ids, (*self.ids.shape[:2], num_units))
        self.ids[:, row, :num_units] = self.pool.take(self.number, num_units)
        self.count[row] = num_units

    def finder(self, hashes: list[bytes]) -> Finder:
        raise NotImplementedError(f"{self.spec.kind} groups take no part in prefix caching")

    def cache(self, row: int, filled: Filled) -> None:
        """Nothing is shared."""

    def keep_boundary(self, row: int, hashes: list[bytes], boundary: int) -> None:
        """Nothing is shared."""

    def ends_let_go_of(self, row: int, boundaries: Sequence[int]) -> Sequence[int]:
        return ()

    def capacity(self, row: int) -> int:
        return NEVER

    def next_cached(self, row: int) -> int:
        return NEVER

    def capacities(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        return np.full(len(rows), NEVER)

    def next_cacheable(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        return np.full(len(rows), NEVER)

    def release_rows(self, rows: NDArray[np.intp], computed: NDArray[np.int64]) -> None:
        """Nothing is let go of before the request ends."""

    def rewind(self, rows: NDArray[np.intp], num_tokens: NDArray[np.int64]) -> None:
        """The blocks stay: what comes next writes over what does not stand."""

    def needed_rows(
        self, rows: NDArray[np.intp], after: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        return np.zeros(len(rows), np.int64)

    def extend_rows(
        self, rows: NDArray[np.intp], num_units: NDArray[np.int64], after: NDArray[np.int64]
    ) -> None:
        """Nothing grows."""


class CrossAttentionManager(PrivateManager):
    """Blocks for the encoder's output, whose length is known when the request starts."""

    def units_for(self, span: Span) -> int:
        return cdiv(span.num_encoder_tokens, self.block_size)


class ScratchManager(PrivateManager):
    """One ring a request."""

    def units_for(self, span: Span) -> int:
        return 1
