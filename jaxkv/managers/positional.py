"""Managers whose units stand for blocks of tokens: full, windowed and chunked attention."""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxkv.arrays import grown
from jaxkv.managers.base import Filled, HitPart, Manager, ManagerContext, Span
from jaxkv.pool import Units
from jaxkv.specs import AttentionSpec, cdiv


class PositionalManager(Manager):
    """Keeps compact tables: entry i of a row is block first_block + i, and only blocks that are held have
    entries.

    ids: int32[width, rows, table_width]. first_block, count, cached, inside: int64[rows]; `cached` is the
    position of the first block that has not been looked at for caching, `inside` the first hash not looked at
    for hits that end inside a block. Rows and width grow by doubling.
    """

    def __init__(
        self,
        context: ManagerContext,
        spec: AttentionSpec,
        group_ids: Sequence[int],
        blocks_per_state: int,
        is_eagle: bool,
        context_parallel_size: int = 1,
    ) -> None:
        super().__init__(context, spec, group_ids, blocks_per_state, is_eagle)
        if spec.dcp_sharded:
            # A block of every rank holds block_size tokens of its own: together they cover that many more.
            self.block_size *= context_parallel_size
        self.ids: NDArray[np.int32] = np.zeros((self.width, 0, 8), np.int32)
        self.first_block: NDArray[np.int64] = np.zeros(0, np.int64)
        self.count: NDArray[np.int64] = np.zeros(0, np.int64)
        self.cached: NDArray[np.int64] = np.zeros(0, np.int64)
        self.inside: NDArray[np.int64] = np.zeros(0, np.int64)
        self.hashes_per_block = max(1, self.block_size // context.hash_block_size)

    # What differs by kind

    @abstractmethod
    def first_needed(self, length: int) -> int:
        """The first token that any token from position `length` on reads."""

    @abstractmethod
    def skipped_tokens(self, computed: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[n]: leading tokens that nobody reads any more once `computed` tokens are settled."""

    @property
    def max_reach(self) -> int:
        """The most tokens below a position that it reads; only used where some are skipped."""
        return 0

    @property
    def gives_back(self) -> bool:
        return True

    # Rows

    def grow_rows(self, num_rows: int) -> None:
        self.ids = grown(self.ids, (self.width, num_rows, self.ids.shape[2]))
        self.first_block = grown(self.first_block, (num_rows,))
        self.count = grown(self.count, (num_rows,))
        self.cached = grown(self.cached, (num_rows,))
        self.inside = grown(self.inside, (num_rows,))

    def open_row(self, row: int, part: HitPart, span: Span) -> None:
        n = len(part.leaders)
        self._reserve_width(n)
        self.first_block[row] = part.first_block
        self.count[row] = n
        if n:
            self.pool.touch(self.number, part.leaders)
            self.ids[:, row, :n] = self.pool.members(self.number, part.leaders)
        # A block that the hit ends in lacks what is below the hit, unless it is copied: then it counts as
        # complete.
        whole = cdiv(part.length, self.block_size)
        self.cached[row] = part.length // self.block_size if part.copy_from >= 0 else whole
        if span.computed > part.length and self.first_needed(span.computed) >= span.computed:
            # Nor does anybody bring it where what follows reads none of it.
            self.cached[row] = cdiv(span.computed, self.block_size)
        # Blocks of the hit are recorded already.
        self.inside[row] = self.cached[row] * self.hashes_per_block

    def close_row(self, row: int) -> Units:
        first, n, size = self.first_block.item(row), self.count.item(row), self.block_size
        leaders = self.ids[0, row, :n][::-1]
        self.count[row] = 0
        return Units(leaders, range(-(first + n) * size, -first * size, size))

    def units_of(self, row: int) -> NDArray[np.int32]:
        return self.ids[0, row, : self.count[row]]

    def positional_ids(self, row: int) -> list[list[int]]:
        first, n = self.first_block.item(row), self.count.item(row)
        held = self.ids[:: self.blocks_per_state, row, :n].tolist()
        return [[0] * first + ids for ids in held]

    def ids_at(self, row: int, token: int) -> NDArray[np.int32]:
        return self.ids[:, row, token // self.block_size - self.first_block.item(row)]

    def _reserve_width(self, width: int) -> None:
        have = self.ids.shape[2]
        if width > have:
            self.ids = grown(self.ids, (*self.ids.shape[:2], max(width, 2 * have)))

    # One request

    def trim(self, part: HitPart, computed: int) -> HitPart:
        if not self.gives_back:
            return part
        skipped = self.first_skipped(computed)
        if skipped <= part.first_block:
            return part
        leaders = part.leaders[skipped - part.first_block :]
        # The block that would be copied may have been skipped, too.
        copy_from = part.copy_from if skipped <= part.length // self.block_size else -1
        return HitPart(skipped, leaders, copy_from, part.length)

    def first_skipped(self, computed: int) -> int:
        """Leading blocks that nobody reads once `computed` tokens are settled."""
        return int(self.skipped_tokens(np.array([computed]))[0]) // self.block_size

    def release_skipped(self, row: int, computed: int) -> None:
        num_blocks = self.first_skipped(computed) - self.first_block.item(row)
        if num_blocks > 0:
            self._release_leading(row, num_blocks)

    def _release_leading(self, row: int, num_blocks: int) -> None:
        n = self.count.item(row)
        num_blocks = min(num_blocks, n)
        if not num_blocks:
            return
        if num_blocks == 1:
            leader = int(self.ids[0, row, 0])
            self._shift(row, n, 1)
            self.pool.let_go_one(leader)
            return
        # Backwards: of what is let go at once, the later blocks are evicted first.
        leaders = self.ids[0, row, :num_blocks][::-1].astype(np.intp)
        self._shift(row, n, num_blocks)
        self.pool.let_go(leaders)

    def _shift(self, row: int, held: int, num_blocks: int) -> None:
        """The row's table of `held` entries begins so many blocks later."""
        self.ids[:, row, : held - num_blocks] = self.ids[:, row, num_blocks:held]
        self.first_block[row] += num_blocks
        self.count[row] = held - num_blocks

    def units_needed(self, row: int, part: HitPart, span: Span) -> int:
        if row < 0:
            held = part.first_block + len(part.leaders)
        else:
            held = self.first_block.item(row) + self.count.item(row)
        missing = cdiv(span.slots, self.block_size) - held
        return missing if missing > 0 else 0

    def extend(self, row: int, num_units: int, span: Span) -> None:
        n = self.count.item(row)
        self._reserve_width(n + num_units)
        self.ids[:, row, n : n + num_units] = self.pool.take(self.number, num_units)
        self.count[row] = n + num_units

    # Caching

    def cache(self, row: int, filled: Filled) -> None:
        scale, hashes = self.hashes_per_block, filled.hashes
        stop = min(filled.tokens // self.block_size, len(hashes) // scale)
        first = self.first_block.item(row)
        start = max(self.cached.item(row), first)
        if stop > start:
            keys = hashes[start * scale + scale - 1 : stop * scale : scale]
            strong = self.wanted(start, stop, filled.info.window_boundaries)
            ready = filled.ready_step if self.context.fine_grained else None
            if stop == start + 1:
                leader = int(self.ids[0, row, start - first])
                wanted = strong if isinstance(strong, bool) else bool(strong[0])
                self._add_one_to_index(leader, keys[0], wanted, ready)
            else:
                leaders = self.ids[0, row, start - first : stop - first]
                self._add_to_index(leaders, keys, strong, ready)
            self.cached[row] = stop
            if self.context.events is not None:
                self._report(filled, start, stop, keys)
        if self.context.fine_grained and scale > 1:
            self._cache_inside(row, filled)

    def cache_rows(self, rows: NDArray[np.intp], filled: Sequence[Filled]) -> None:
        if self.context.fine_grained or self.context.events is not None:
            super().cache_rows(rows, filled)
            return
        firsts = self.first_block[rows]
        starts = np.maximum(self.cached[rows], firsts)
        scale, size = self.hashes_per_block, self.block_size
        stops = [min(one.tokens // size, len(one.hashes) // scale) for one in filled]
        if stops != (starts + 1).tolist():
            super().cache_rows(rows, filled)
            return
        # The usual case: one block each.
        leaders = self.ids[0, rows, starts - firsts]
        keys = [one.hashes[stop * scale - 1] for one, stop in zip(filled, stops, strict=True)]
        self._add_to_index(leaders, keys, self.wanted_last(stops, filled), None)
        self.cached[rows] = starts + 1

    def wanted_last(self, stops: list[int], filled: Sequence[Filled]) -> NDArray[np.bool_] | bool:
        """Of one block of each row, the one before block `stops`: whether the retention policy wants it."""
        wanted = [
            self.wanted(stop - 1, stop, one.info.window_boundaries)
            for one, stop in zip(filled, stops, strict=True)
        ]
        return np.array([one if isinstance(one, bool) else one[0] for one in wanted])

    def _report(self, filled: Filled, start: int, stop: int, keys: list[bytes]) -> None:
        if self.context.events is not None:
            parent = filled.hashes[start * self.hashes_per_block - 1] if start else None
            end = stop * self.block_size
            self.context.events.stored(
                filled.info.request, self.group_ids, self.spec, keys, parent, end, self.block_size
            )

    def wanted(self, start: int, stop: int, boundaries: Sequence[int]) -> NDArray[np.bool_] | bool:
        """Which of the blocks [start, stop) the retention policy wants."""
        return self.context.retention.wanted_blocks(
            start, stop, self.block_size, self.first_needed, self.max_reach, boundaries
        )

    def _cache_inside(self, row: int, filled: Filled) -> None:
        """Records the hashes that end inside a block, of all blocks with known tokens,
        the last one unfilled.
        """
        scale, first, hashes = self.hashes_per_block, self.first_block.item(row), filled.hashes
        stop = min(
            filled.tokens // self.context.hash_block_size, len(hashes), (first + self.count.item(row)) * scale
        )
        begin = max(self.inside.item(row), first * scale)
        for block in range(begin // scale, cdiv(stop, scale)):
            low, high = max(begin, block * scale), min(stop, block * scale + scale - 1)
            if high > low:
                leader = self.ids[0, row, block - first : block - first + 1]
                self.index.add_partial(int(leader[0]), hashes[low:high], filled.ready_step)
                if not self.pool.cached[leader[0]]:
                    self.pool.set_cached(leader, True, filled.ready_step)
        self.inside[row] = max(begin, stop)

    def keep_boundary(self, row: int, hashes: list[bytes], boundary: int) -> None:
        first = self.first_block.item(row)
        low = max(self.first_needed(boundary) // self.block_size, first)
        high = min(boundary // self.block_size, self.cached.item(row))
        if high > low:
            leaders = self.ids[0, row, low - first : high - first].astype(np.intp)
            # The row holds them, so they are in no queue.
            self.pool.strong[leaders[self.pool.cached[leaders]]] = True

    def ends_let_go_of(self, row: int, boundaries: Sequence[int]) -> Sequence[int]:
        size, first = self.block_size, self.first_block.item(row)
        blocks: set[int] = set()
        for boundary in boundaries:
            low = self.first_needed(boundary) // size
            if low < first:
                blocks.update(range(low, min(boundary // size, first)))
        if not blocks:
            return ()
        return [(block + 1) * size for block in sorted(blocks, reverse=True)]

    def capacity(self, row: int) -> int:
        return (self.first_block.item(row) + self.count.item(row)) * self.block_size

    def next_cached(self, row: int) -> int:
        return (self.cached.item(row) + 1) * self.block_size

    # All rows of a decode step

    def capacities(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        return (self.first_block[rows] + self.count[rows]) * self.block_size

    def next_cacheable(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        return (self.cached[rows] + 1) * self.block_size

    def release_rows(self, rows: NDArray[np.intp], computed: NDArray[np.int64]) -> None:
        excess = self.skipped_tokens(computed) // self.block_size - self.first_block[rows]
        excess = np.minimum(excess, self.count[rows])
        behind = np.flatnonzero(excess > 0)
        if not len(behind):
            return
        freed = []
        for row, n, k in zip(
            rows[behind].tolist(), self.count[rows[behind]].tolist(), excess[behind].tolist(), strict=True
        ):
            freed.append(self.ids[0, row, :k][::-1].copy())
            self.ids[:, row, : n - k] = self.ids[:, row, k:n]
        self.first_block[rows[behind]] += excess[behind]
        self.count[rows[behind]] -= excess[behind]
        self.let_go(np.concatenate(freed))

    def rewind(self, rows: NDArray[np.intp], num_tokens: NDArray[np.int64]) -> None:
        """The blocks stay: what comes next writes over what does not stand."""

    def needed_rows(
        self, rows: NDArray[np.intp], after: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        held = self.first_block[rows] + self.count[rows]
        return np.maximum(-(-slots // self.block_size) - held, 0)

    def extend_rows(
        self, rows: NDArray[np.intp], num_units: NDArray[np.int64], after: NDArray[np.int64]
    ) -> None:
        total = int(num_units.sum())
        if not total:
            return
        counts = self.count[rows]
        self._reserve_width(int((counts + num_units).max()))
        units = self.pool.take(self.number, total)
        if (num_units == 1).all():
            self.ids[:, rows, counts] = units
        else:
            targets = np.repeat(rows, num_units)
            offsets = np.arange(total) - np.repeat(np.cumsum(num_units) - num_units, num_units)
            self.ids[:, targets, np.repeat(counts, num_units) + offsets] = units
        self.count[rows] = counts + num_units
