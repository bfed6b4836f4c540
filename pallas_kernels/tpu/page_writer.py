"""Writing runs of new tokens from inside a kernel: by one DMA a run and piece.

Where tokens share rows, a set of them (`SharedRows`) that is not all new is read, mixed and written back: at
the two ends of a sequence's new tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES, AttentionPageLayout
from pallas_kernels.tpu.new_rows import NewRows, Piece, mix_words
from pallas_kernels.tpu.page_runs import NewPages, PageRuns

MIXED_BYTES = 1 << 20  # of the sets that are mixed at a time
ENDS = 2  # of a run, where sets may have to be mixed


class MixedSet(NamedTuple):
    """A set with old and new tokens, of share number `share` (`shares_of`).

    page: where it is. place: its number in the buffers. in_page, in_rows: its number among
    the sets of the page and of the new rows. first, end: which of its tokens are new.
    """

    share: int
    pieces: tuple[Piece, ...]
    page: jax.Array
    place: jax.Array
    in_page: jax.Array
    in_rows: jax.Array
    first: jax.Array
    end: jax.Array


@dataclass(frozen=True)
class PageWriter:
    """Writes `runs` (refs in SMEM) of `rows` (refs, one for each share) to `pages`, all of one `layout`.

    whole, mixed: semaphores for sets that are all new, and for those that are mixed in the buffers old and
    new, `[ENDS * runs at a time, rows of an image, 128]`. Where tokens share no rows, there is `whole` alone.
    """

    layout: AttentionPageLayout
    runs: PageRuns
    rows: tuple[Any, ...]
    pages: Any
    whole: Any
    mixed: Any = None
    old: Any = None
    new: Any = None

    @staticmethod
    def scratch(layout: AttentionPageLayout, new: NewPages) -> list[Any]:
        """What a kernel allocates: the fields from `whole` on."""
        semaphore = pltpu.SemaphoreType.DMA(())
        if not NewRows(layout).are_mixed:
            return [semaphore]
        image = NewRows(layout).count
        together = max(min(MIXED_BYTES // (ENDS * image * LANES * 4), new.runs.page.shape[0]), 1)
        buffer = pltpu.VMEM((ENDS * together, image, LANES), jnp.uint32)
        return [semaphore, semaphore, buffer, buffer]

    def start(self) -> None:
        """Starts what is written as it is, and writes what is mixed."""
        self._each_new(lambda copy: copy.start())
        if self.old is None:
            return
        together = self.old.shape[0] // ENDS

        def write_some(turn, _):
            runs = turn * together, jnp.minimum((turn + 1) * together, self.runs.live[0])
            self._each_mixed(runs, lambda mixed: self._read(mixed, lambda copy: copy.start()))
            self._each_mixed(runs, lambda mixed: self._read(mixed, lambda copy: copy.wait()))
            self._each_mixed(runs, self._mix)
            self._each_mixed(runs, lambda mixed: self._write(mixed, lambda copy: copy.start()))
            self._each_mixed(runs, lambda mixed: self._write(mixed, lambda copy: copy.wait()))

        lax.fori_loop(0, (self.runs.live[0] + together - 1) // together, write_some, None)

    def wait(self) -> None:
        """Waits for what `start` has left under way."""
        self._each_new(lambda copy: copy.wait())

    def _each_new(self, act: Callable[[Any], None]) -> None:
        """Calls `act` on the copies of sets that are all new, those of a run and piece at once."""

        def of_run(run, _):
            slot, end = self.runs.slot[run], self.runs.slot[run] + self.runs.tokens[run]
            for share, pieces in enumerate(NewRows(self.layout).shares):
                size, rows = pieces[0].shared.neighbours, pieces[0].shared.rows
                first, stop = (slot + size - 1) // size, end // size
                source = self._source(share, run) + first - slot // size

                @pl.when(stop > first)
                def _(share=share, pieces=pieces, rows=rows, first=first, stop=stop, source=source):
                    sets = stop - first
                    for index, piece in enumerate(pieces):
                        act(
                            pltpu.make_async_copy(
                                self.rows[share].at[index, pl.ds(source * rows, sets * rows)],
                                self.pages.at[self.runs.page[run], piece.rows_of_page(first, sets)],
                                self.whole,
                            )
                        )

        lax.fori_loop(0, self.runs.live[0], of_run, None)

    def _each_mixed(self, runs: tuple[Any, Any], act: Callable[[MixedSet], None]) -> None:
        """Calls `act` on the sets of some runs that are mixed."""

        def of_run(run, _):
            slot, end = self.runs.slot[run], self.runs.slot[run] + self.runs.tokens[run]
            for share, pieces in enumerate(NewRows(self.layout).shares):
                size = pieces[0].shared.neighbours
                if size == 1:
                    continue
                first, last = slot // size, (end - 1) // size
                at_front = slot % size > 0
                at_back = (end % size > 0) & ((last > first) | jnp.logical_not(at_front))
                for side, (number, needed) in enumerate(((first, at_front), (last, at_back))):
                    mixed = MixedSet(
                        share,
                        pieces,
                        self.runs.page[run],
                        (run - runs[0]) * ENDS + side,
                        number,
                        self._source(share, run) + number - first,
                        jnp.maximum(slot - number * size, 0),
                        jnp.minimum(end - number * size, size),
                    )
                    pl.when(needed)(lambda mixed=mixed: act(mixed))

        lax.fori_loop(*runs, of_run, None)

    def _source(self, share: int, run) -> jax.Array:
        return self.runs.source[share * self.runs.page.shape[0] + run]

    def _in_page(self, mixed: MixedSet, piece: Piece):
        return self.pages.at[mixed.page, piece.rows_of_page(mixed.in_page)]

    def _read(self, mixed: MixedSet, act: Callable[[Any], None]) -> None:
        for index, piece in enumerate(mixed.pieces):
            rows, place = piece.shared.rows, piece.rows_of_image()
            old, new = self.old.at[mixed.place, place], self.new.at[mixed.place, place]
            source = self.rows[mixed.share].at[index, pl.ds(mixed.in_rows * rows, rows)]
            act(pltpu.make_async_copy(self._in_page(mixed, piece), old, self.mixed))
            act(pltpu.make_async_copy(source, new, self.mixed))

    def _mix(self, mixed: MixedSet) -> None:
        for piece in mixed.pieces:
            place = piece.rows_of_image()
            self.old[mixed.place, place] = mix_words(
                self.new[mixed.place, place],
                self.old[mixed.place, place],
                piece.shared,
                mixed.first,
                mixed.end,
            )

    def _write(self, mixed: MixedSet, act: Callable[[Any], None]) -> None:
        for piece in mixed.pieces:
            source = self.old.at[mixed.place, piece.rows_of_image()]
            act(pltpu.make_async_copy(source, self._in_page(mixed, piece), self.mixed))
