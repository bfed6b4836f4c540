"""Puts one step together: which rows, how many tokens each, who is admitted, who loses its blocks."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jaxkv.request import Request
from jaxkv.scheduling.admission import Admission
from jaxkv.scheduling.chunks import chunk_end
from jaxkv.scheduling.config import SchedulerConfig
from jaxkv.scheduling.lifecycle import Lifecycle
from jaxkv.scheduling.transfers import Transfers
from jaxkv.specs import MambaSpec

if TYPE_CHECKING:
    from jaxkv.cache_manager import KVCacheManager
    from jaxkv.hits import PrefixHit


@dataclass
class StepDraft:
    """The rows chosen so far.

    decodes: rows of one token each, in pieces. chunk_rows, chunk_sizes: the others and their tokens.
    num_drafts: how many tokens of a row are drafts, by row, for rows that have any.
    stalled: some running row found no block and waits. reads_prompts: some row is not decoding.
    """

    budget: int
    decodes: list[NDArray[np.int32]] = field(default_factory=list)
    chunk_rows: list[int] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    num_drafts: dict[int, int] = field(default_factory=dict)
    stalled: bool = False
    reads_prompts: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing has changed for it."""
        return not (self.decodes or self.chunk_rows or self.admitted or self.preempted)

    def add_chunk(self, row: int, size: int) -> None:
        """The next `size` tokens of a prompt."""
        self.reads_prompts = True
        self.budget -= size
        self._add(row, size)

    def add_drafts(self, row: int, num_drafts: int) -> None:
        """A decoding row's last token, which is in the budget already, and drafts to verify."""
        if num_drafts:
            self.num_drafts[row] = num_drafts
            self.budget -= num_drafts
        self._add(row, 1 + num_drafts)

    def _add(self, row: int, size: int) -> None:
        if size == 1:
            self.decodes.append(np.array([row], np.int32))
        else:
            self.chunk_rows.append(row)
            self.chunk_sizes.append(size)


class StepBuilder:
    """Builds the steps of one scheduler.
    Holds nothing from one step to the next but what saves a useless retry.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache_manager: "KVCacheManager",
        lifecycle: Lifecycle,
        admission: Admission,
        transfers: Transfers,
    ) -> None:
        self._config = config
        self._kv = cache_manager
        self._life = lifecycle
        self._table = lifecycle.table
        self._admission = admission
        self._transfers = transfers
        # States that every recurrent group can leave inside a chunk.
        self._num_inside = min(
            (
                group.spec.num_prefill_checkpoint_blocks
                for group in cache_manager.plan.groups
                if isinstance(group.spec, MambaSpec)
            ),
            default=0,
        )
        self._lookahead = cache_manager.plan.limits.num_lookahead_tokens
        self._refused: tuple[object, ...] | None = None

    def build(self) -> StepDraft:
        self._life.poll_transfers()
        self._transfers.raise_put_off()
        self._kv.new_step_starts()
        draft = StepDraft(self._config.max_num_batched_tokens)
        self._continue_running(draft)
        if len(self._life.waiting) and not draft.preempted and not draft.stalled:
            try:
                self._admit_waiting(draft)
            except Exception as error:
                if draft.is_empty:
                    # No step gets this number: the cache's and the scheduler's steps are counted alike.
                    self._kv.clock.step -= 1
                    raise
                # The rows chosen so far have their blocks, and what the step fills is in the index.
                self._transfers.put_off(error)
        return draft

    # Running rows

    def _continue_running(self, draft: StepDraft) -> None:
        running = self._life.running.rows
        rows = self._rows_with_work(running)
        prefilling = self._table.prefilling[rows]
        num_prefilling = int(np.count_nonzero(prefilling))
        draft.budget -= len(rows) - num_prefilling
        cursor = _Cursor(rows, len(rows), ends_soon=len(rows) < len(running))
        if num_prefilling or self._config.num_speculative_tokens:
            one_by_one = prefilling | (self._table.num_drafts[rows] > 0)
            for index in np.flatnonzero(one_by_one).tolist():
                self._schedule_decodes(draft, cursor, index)
                if prefilling[index]:
                    self._schedule_chunk(draft, cursor)
                else:
                    self._schedule_drafts(draft, cursor)
        self._schedule_decodes(draft, cursor, len(rows))

    def _rows_with_work(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Without those whose last token is already on its way (only where steps overlap)."""
        if not self._config.async_scheduling:
            return rows
        table = self._table
        wanted = table.num_tokens[rows] + table.num_placeholders[rows] < table.max_total[rows]
        return rows if wanted.all() else rows[wanted]

    def _schedule_decodes(self, draft: StepDraft, cursor: "_Cursor", stop: int) -> None:
        """One token for every row from the cursor up to index `stop`."""
        while cursor.index < min(stop, cursor.limit):
            rows = cursor.rows[cursor.index : min(stop, cursor.limit)]
            after = self._table.num_computed[rows] + 1
            done = self._kv.allocate_decodes(rows, after, num_lookahead_tokens=self._lookahead).num_done
            if done:
                draft.decodes.append(rows[:done])
                cursor.index += done
            if done < len(rows) and not self._make_room(draft, cursor):
                cursor.index += 1

    def _schedule_chunk(self, draft: StepDraft, cursor: "_Cursor") -> None:
        """The next tokens of the prompt that the row at the cursor is reading."""
        if cursor.index >= cursor.limit or draft.budget == 0:
            cursor.index += 1
            return
        row = int(cursor.rows[cursor.index])
        request = self._table.request(row)
        start = request.num_computed_tokens
        size = self._chunk_size(request, start, draft.budget)
        while self._kv.allocate_slots(request, size, num_lookahead_tokens=self._lookahead) is None:
            if not self._make_room(draft, cursor):
                break
        else:
            draft.add_chunk(row, size)
        cursor.index += 1

    def _schedule_drafts(self, draft: StepDraft, cursor: "_Cursor") -> None:
        """The last token and the drafts of the decoding row at the cursor. Nobody loses blocks for drafts."""
        if cursor.index >= cursor.limit:
            return
        row, table = int(cursor.rows[cursor.index]), self._table
        # The last token is sampled but never computed.
        most = int(table.max_total[row] - table.num_tokens[row]) - 1
        num_drafts = min(int(table.num_drafts[row]), draft.budget, most)
        request = table.request(row)
        while self._kv.allocate_slots(request, 1 + num_drafts, num_lookahead_tokens=self._lookahead) is None:
            if num_drafts:
                num_drafts = 0
            elif not self._make_room(draft, cursor):
                break
        else:
            draft.add_drafts(row, num_drafts)
            table.num_drafts[row] = num_drafts
        cursor.index += 1

    def _make_room(self, draft: StepDraft, cursor: "_Cursor") -> bool:
        """Takes the blocks of the latest arrival. False: the row at the cursor has to wait.

        It waits where it is itself the latest, and where blocks are about to come back anyway.
        """
        if cursor.index == cursor.limit - 1 or cursor.ends_soon or self._life.frees_pending:
            draft.stalled = True
            return False
        cursor.limit -= 1
        draft.preempted.append(self._life.preempt(int(cursor.rows[cursor.limit])).request_id)
        if self._life.frees_pending:
            draft.stalled = True
            return False
        return True

    def _chunk_size(self, request: Request, start: int, budget: int, hit: "PrefixHit | None" = None) -> int:
        """Tokens of the prompt's next chunk; `hit` is given where the request has no row yet."""
        end = request.num_tokens
        limit = min(end, start + budget)
        threshold = self._config.long_prefill_token_threshold
        if threshold and len(self._life) > 1:
            limit = min(limit, start + threshold)
        keep = self._kv.checkpoint_positions(request, hit)
        return chunk_end(start, limit, end, self._kv.chunk_alignment, keep, self._num_inside) - start

    # Waiting requests

    def _admit_waiting(self, draft: StepDraft) -> None:
        skipped: set[str] = set()
        while draft.budget and self._life.num_with_blocks < self._config.max_num_seqs:
            request = next((r for r in self._life.waiting if r.request_id not in skipped), None)
            if request is None:
                return
            if request.row is not None:
                # Preempted while a step was in flight: it still holds the blocks of that step.
                skipped.add(request.request_id)
                continue
            state = self._retry_state(request)
            if state == self._refused:
                return
            hit = self._kv.get_computed_blocks(request)
            if hit.pending:
                # Its prefix ends in a state that this very step computes.
                skipped.add(request.request_id)
                continue
            if not self._admit(draft, request, hit):
                self._refused = state
                return

    def _admit(self, draft: StepDraft, request: Request, hit: "PrefixHit") -> bool:
        """Gives a waiting request its blocks and, unless a connector is still filling them, its first chunk.
        False: it does not fit, and nothing has changed.
        """
        rows = self._life.rows_wanting_blocks()
        if not self._admission.fits(
            request,
            hit,
            rows=rows,
            num_tokens=self._table.num_tokens[rows],
            num_running=self._life.num_with_blocks,
        ):
            return False
        match = self._transfers.match(request, hit)
        computed = hit.num_tokens + match.num_tokens
        size = 0 if match.is_async else self._chunk_size(request, computed, draft.budget, hit)
        allocation = self._kv.allocate_slots(
            request,
            size,
            hit=hit,
            num_lookahead_tokens=0 if match.is_async else self._lookahead,
            num_external_tokens=match.num_tokens,
            delay_cache_blocks=match.num_tokens > 0,
            num_encoder_tokens=request.num_encoder_tokens,
        )
        if allocation is None:
            if self._life.num_with_blocks:
                return False
            # A hit that ends inside a block takes that block and its copy, which may be one more than the
            # pool has; where nobody else runs, waiting would not help.
            shorter = self._kv.lookup.without_copies(request, hit)
            return shorter.num_tokens < hit.num_tokens and self._admit(draft, request, shorter)
        self._transfers.load(request, hit, match)
        if match.num_tokens and not match.is_async:
            self._kv.cache_blocks(request, computed + size)
        row = self._life.admit(request, hit, match.num_tokens)
        draft.admitted.append(request.request_id)
        if size:
            draft.add_chunk(row, size)
        return True

    def _retry_state(self, request: Request) -> tuple[object, ...]:
        """What an admission depends on. While it stays the same, a refused request would be refused again."""
        rows = self._life.running.rows
        return (
            request.request_id,
            self._life.num_with_blocks,
            self._kv.num_free_blocks,
            self._kv.pool.version,
            int(self._table.num_computed[rows[self._table.prefilling[rows]]].sum()),
        )


@dataclass
class _Cursor:
    """A walk over `rows`, oldest first. Rows from `limit` on have lost their blocks.

    ends_soon: running rows that are not in `rows` will end with the next results, and give their blocks back.
    """

    rows: NDArray[np.int32]
    limit: int
    ends_soon: bool
    index: int = 0
