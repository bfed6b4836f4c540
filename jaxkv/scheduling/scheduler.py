"""Continuous batching: which requests compute how many tokens in the next step.

Every step goes through the running rows, oldest request first: one token for each that decodes, and what is
left of the token budget for prompts that are still being read. Then waiting requests are admitted while the
budget and the pool allow. A running row that finds no block takes those of the latest arrival; the latest
arrival itself waits with what it has, so nobody ever gives up its own blocks, and the oldest request always
moves on.

Rows are handled as arrays. Single requests are looked at only when they are admitted, read a chunk of their
prompt, need a block, or end.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.cache_manager import KVCacheManager
from jaxkv.checks import check_is
from jaxkv.connector import KVConnector
from jaxkv.decode_run import can_run, count_decodes, run_decodes
from jaxkv.errors import JaxkvError
from jaxkv.planning.plan import CachePlan
from jaxkv.request import Request, RequestStatus, as_token_ids
from jaxkv.request_table import NO_TOKEN, RequestTable
from jaxkv.scheduling.admission import Admission
from jaxkv.scheduling.config import SchedulerConfig
from jaxkv.scheduling.lifecycle import Lifecycle
from jaxkv.scheduling.output import FinishedRequest, SchedulerOutput, StepResult
from jaxkv.scheduling.results import SampledTokens, check_sampled, check_verified
from jaxkv.scheduling.step_builder import StepBuilder, StepDraft
from jaxkv.scheduling.transfers import Transfers

_NO_DRAFTS: NDArray[np.int32] = np.empty(0, np.int32)


class SchedulerStats(NamedTuple):
    """Counters under vLLM's names; the first two are of the moment, the others since the start."""

    num_requests_running: int
    num_requests_waiting: int
    num_preemptions: int
    num_requests_finished: int
    prompt_tokens: int
    generation_tokens: int
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0


class Scheduler:
    """Serves requests from one cache.

    Call `schedule`, run the step, give its tokens to `update_from_output`; with `async_scheduling` one more
    `schedule` may come in between. `table` holds the tokens of running requests:
    `SchedulerOutput.token_arrays` reads it. A table of another make may be given.
    """

    def __init__(
        self,
        plan: CachePlan,
        cache_manager: KVCacheManager,
        config: SchedulerConfig | None = None,
        *,
        connector: KVConnector | None = None,
        table: RequestTable | None = None,
    ) -> None:
        self.config = SchedulerConfig() if config is None else config
        check_is("config", self.config, SchedulerConfig)
        check_is("plan", plan, CachePlan)
        check_is("cache_manager", cache_manager, KVCacheManager)
        if connector is not None:
            check_is("connector", connector, KVConnector)
        served = cache_manager.plan
        if served != plan:
            raise JaxkvError(
                f"the cache manager serves another plan, of {served.num_blocks} blocks in "
                f"{len(served.groups)} groups; this one has {plan.num_blocks} in {len(plan.groups)}"
            )
        self.config.check_fits(plan)
        self.plan = plan
        self.cache_manager = cache_manager
        self._admission = Admission(plan, cache_manager, self.config.watermark)
        transfers = Transfers(connector, cache_manager)
        table = RequestTable(num_rows=self.config.max_num_seqs) if table is None else table
        self._life = Lifecycle(cache_manager, transfers, table)
        self._builder = StepBuilder(self.config, cache_manager, self._life, self._admission, transfers)
        self._in_flight: deque[SchedulerOutput] = deque()
        self._next_step = 0
        self._num_generated_tokens = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._ones = np.ones(self.config.max_num_seqs, np.int32)
        self._all_true = np.ones(self.config.max_num_seqs, np.bool_)
        for shared in (self._ones, self._all_true):
            shared.flags.writeable = False  # parts of them go into every output

    @property
    def table(self) -> RequestTable:
        return self._life.table

    @property
    def num_requests_running(self) -> int:
        return len(self._life.running)

    @property
    def num_requests_waiting(self) -> int:
        """In the queue, or waiting for a connector."""
        return len(self._life) - len(self._life.running)

    @property
    def has_unfinished_requests(self) -> bool:
        return len(self._life) > 0

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_requests_running=self.num_requests_running,
            num_requests_waiting=self.num_requests_waiting,
            num_preemptions=self._life.num_preemptions,
            num_requests_finished=self._life.num_finished,
            prompt_tokens=self._life.num_prompt_tokens,
            generation_tokens=self._num_generated_tokens,
            spec_decode_num_draft_tokens=self._num_draft_tokens,
            spec_decode_num_accepted_tokens=self._num_accepted_tokens,
        )

    def running_requests(self) -> list[Request]:
        """Oldest first; for people and tests."""
        return [self.table.request(row) for row in self._life.running.rows.tolist()]

    def waiting_requests(self) -> list[Request]:
        """In the order in which they will be looked at."""
        return list(self._life.waiting)

    def add_request(self, request: Request) -> None:
        """Puts a request in the queue. Raises JaxkvError, and changes nothing,
        for one that could never run.
        """
        check_is("request", request, Request)
        if self._life.holds_id(request.request_id):
            raise JaxkvError(f"request id {request.request_id!r} is already in use")
        if request.status is not RequestStatus.WAITING:
            raise JaxkvError(f"request {request.request_id!r} was already served: {request.status.name}")
        limit = self.plan.max_model_len
        if request.num_tokens >= limit:
            raise JaxkvError(
                f"request {request.request_id!r} has a prompt of {request.num_tokens} tokens; with "
                f"max_model_len {limit} it can have at most {limit - 1}, to leave room for an answer"
            )
        max_total = min(request.max_total_tokens, limit)
        # The last token is sampled but never computed.
        self._admission.check_can_fit(request, max_total - 1)
        request.max_total_tokens = max_total
        self._life.add(request)

    def abort(self, request_id: str) -> bool:
        """Ends a request at any time, wherever it is. False: it has already ended, or never was."""
        return self.finish_request(request_id, RequestStatus.FINISHED_ABORTED)

    def finish_request(self, request_id: str, status: RequestStatus = RequestStatus.FINISHED_STOPPED) -> bool:
        """Ends a request from outside: a stop string was found, its client is gone.
        False: there was none such.
        """
        check_is("request_id", request_id, str)
        check_is("status", status, RequestStatus)
        if status.finish_reason is None:
            raise JaxkvError(f"a request cannot end with the status {status.name}")
        request = self._life.find(request_id)
        if request is None:
            return False
        self._life.end(request, status)
        return True

    def schedule(self) -> SchedulerOutput:
        """Chooses the next step and gives it its blocks. It may be empty: then nothing can run before new
        requests, or the results of a step in flight, arrive.

        Raises JaxkvError when as many steps are in flight as the configuration allows. What a connector
        raises comes through, and nothing is lost: the request stays in the queue. Where a step, or the taking
        of results, would be cut short by it, the next call raises it; see `KVConnector`.
        """
        if len(self._in_flight) >= self.config.batches_in_flight:
            raise JaxkvError(
                f"{len(self._in_flight)} steps are in flight and async_scheduling is "
                f"{self.config.async_scheduling}: update_from_output must come first"
            )
        output = self._emit(self._builder.build())
        self._in_flight.append(output)
        return output

    def update_draft_token_ids(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Proposes what comes next for requests by id: the next step verifies as many as it has room for.

        At most num_speculative_tokens of a request are taken. Requests that do not decode (they wait, or read
        their prompts) and those that have ended are passed over. Raises JaxkvError, and changes nothing, for
        what are no token ids, while a step is in flight, and where the configuration has no drafts.
        """
        most = self.config.num_speculative_tokens
        if not most:
            raise JaxkvError("the scheduler's num_speculative_tokens is 0: it verifies no drafts")
        if self._in_flight:
            raise JaxkvError(f"step {self._in_flight[0].step} is in flight: drafts follow its results")
        checked = {
            request_id: as_token_ids(token_ids, f"drafts of request {request_id!r}")[:most]
            for request_id, token_ids in drafts.items()
            if len(token_ids)
        }
        for request_id in drafts:
            request = self._life.find(request_id)
            if request is None or request.status is not RequestStatus.RUNNING or request.row is None:
                continue
            if not self.table.prefilling[request.row]:
                self.table.put_drafts(request.row, checked.get(request_id, _NO_DRAFTS))

    def update_from_output(self, output: SchedulerOutput, sampled_token_ids: SampledTokens) -> StepResult:
        """Takes the results of the oldest step in flight.

        sampled_token_ids: int32[m], one for each row that samples, in the order of `output.sampling`. Of a
        step with drafts a list for each (or int32[m, w], padded with NO_TOKEN): the drafts that the model
        confirmed, and one token more. Computed tokens that were not confirmed are taken back.
        Raises JaxkvError, and changes nothing, for another step, another number of tokens, ids out of range
        and drafts that were not proposed.
        """
        if not self._in_flight or self._in_flight[0] is not output:
            oldest = f"step {self._in_flight[0].step}" if self._in_flight else "no step"
            raise JaxkvError(f"results of step {output.step} arrived, but {oldest} is the oldest in flight")
        has_drafts = output.num_drafts is not None
        if has_drafts:
            tokens = check_verified(output, self.table, sampled_token_ids)
        else:
            tokens = check_sampled(output, sampled_token_ids)
        self._in_flight.popleft()
        table = self.table
        indices = output.sampling
        rows, epochs = output.rows.astype(np.intp), output.epochs
        if len(indices) < len(rows):
            rows, epochs = rows[indices], epochs[indices]
        wanted = table.epoch[rows] == epochs
        if np.count_nonzero(wanted) < len(wanted):
            indices, rows, tokens = indices[wanted], rows[wanted], tokens[wanted]
        result = self._verify(output, indices, tokens) if has_drafts else self._append(indices, rows, tokens)
        self._num_generated_tokens += len(result)
        self._life.settle(output.step)
        return result

    def _append(
        self, indices: NDArray[np.intp], rows: NDArray[np.intp], tokens: NDArray[np.int32]
    ) -> StepResult:
        """One more token for each row; some end with it."""
        table = self.table
        table.fill_placeholders(rows, tokens)
        lengths = table.num_tokens[rows]
        stopped = table.ends_at(rows, tokens)
        ended = stopped | (lengths >= table.max_total[rows])
        return StepResult(
            indices=indices,
            token_ids=tokens,
            num_output_tokens=lengths - table.num_prompt[rows],
            request_ids=table.request_ids[rows],
            finished=self._end_rows(rows, stopped, ended) if np.count_nonzero(ended) else (),
        )

    def _verify(
        self, output: SchedulerOutput, indices: NDArray[np.intp], tokens: NDArray[np.int32]
    ) -> StepResult:
        """The tokens int32[m, w] of rows with drafts; what a row computed beyond them is taken back."""
        assert output.num_drafts is not None
        table, num_drafts = self.table, output.num_drafts[indices]
        rows = output.rows[indices].astype(np.intp)
        counts = (tokens != NO_TOKEN).sum(axis=1)
        rejected = num_drafts + 1 - counts
        table.num_computed[rows] -= rejected
        (short,) = rejected.nonzero()
        # Before the right tokens are known: with them, the wrong content could be cached under their hash.
        self.cache_manager.rewind(rows[short], table.num_computed[rows[short]])
        table.num_drafts[rows] = 0
        table.num_placeholders[rows] = counts
        self._num_draft_tokens += int(num_drafts.sum())
        self._num_accepted_tokens += int((counts - 1).sum())
        parts: list[StepResult] = []
        alive = np.arange(len(rows))
        for column in range(tokens.shape[1]):
            alive = alive[counts[alive] > column]
            if column:
                alive = alive[table.epoch[rows[alive]] == output.epochs[indices[alive]]]
            parts.append(self._append(indices[alive], rows[alive], tokens[alive, column]))
        return StepResult.joined(parts)

    def count_decodes(self, most: int) -> int:
        """Counts up to `most` steps as scheduled and done in which the scheduler has nothing to decide: every
        running row decodes one token, for which there is surely room, and none ends. Returns how many.

        For simulations, which need no tokens: their ids are not known, and no row may look for end tokens.
        The steps are those that `schedule` and `update_from_output` would do one by one.
        """
        # In the type that numpy indexes with.
        rows, table = self._life.running.rows.astype(np.intp), self.table
        full = len(rows) >= self.config.max_num_seqs
        if self._in_flight or not len(rows) or (len(self._life) > len(rows) and not full):
            return 0
        if (
            self.config.max_num_batched_tokens < len(rows)
            or (table.prefilling[rows] | (table.num_drafts[rows] > 0)).any()
        ):
            return 0
        # The step that gives the last token ends the request.
        most = min(most, int((table.max_total[rows] - table.num_tokens[rows]).min()) - 1)
        first_step = self._next_step
        if len(rows) == 1 and most > 0 and can_run(self.cache_manager, int(rows[0]), most):
            table.num_tokens[rows] += most
            run_decodes(self.cache_manager, int(rows[0]), int(table.num_computed[rows[0]]), most)
            table.num_computed[rows] += most
            self._next_step += most
        while self._next_step - first_step < most:
            steps = count_decodes(
                self.cache_manager, rows, table.num_computed[rows], most - (self._next_step - first_step)
            )
            if not steps:
                break
            table.num_tokens[rows] += steps
            table.num_computed[rows] += steps
            self._next_step += steps
        steps = self._next_step - first_step
        if steps:
            table.last_step[rows] = self._next_step - 1
            self._num_generated_tokens += steps * len(rows)
            self._life.scheduled_step = self._next_step - 1
            self._life.settle(self._next_step - 1)
        return steps

    def _end_rows(
        self, rows: NDArray[np.intp], stopped: NDArray[np.bool_], ended: NDArray[np.bool_]
    ) -> tuple[FinishedRequest, ...]:
        finished = []
        for index in np.flatnonzero(ended).tolist():
            request = self.table.request(int(rows[index]))
            self._life.end(
                request,
                RequestStatus.FINISHED_STOPPED if stopped[index] else RequestStatus.FINISHED_LENGTH_CAPPED,
            )
            finished.append(FinishedRequest(request, "stop" if stopped[index] else "length"))
        return tuple(finished)

    def _emit(self, draft: StepDraft) -> SchedulerOutput:
        """The draft as arrays; the rows' counters move on as if the step had run."""
        table = self.table
        rows = _joined(draft.decodes)
        num_decodes = len(rows)
        num_scheduled = self._ones[:num_decodes]
        if draft.chunk_rows:
            rows = np.concatenate([rows, np.array(draft.chunk_rows, np.int32)])
            num_scheduled = np.concatenate([num_scheduled, np.array(draft.chunk_sizes, np.int32)])
        # In the type that numpy indexes with: with int32 each use takes three times as long.
        index = rows.astype(np.intp)
        before = table.num_computed[index]
        after = before + num_scheduled
        table.num_computed[index] = after
        table.last_step[index] = self._next_step
        num_drafts = None
        if draft.num_drafts:
            num_drafts = np.array([draft.num_drafts.get(row, 0) for row in rows.tolist()], np.int32)
        if draft.reads_prompts:
            samples = after >= table.num_tokens[index] + table.num_placeholders[index]
            sampling = index[samples]
            table.prefilling[sampling] = False
        else:
            samples, sampling = self._all_true[: len(rows)], index
        output = SchedulerOutput(
            step=self._next_step,
            rows=rows,
            epochs=table.epoch[index],
            num_scheduled=num_scheduled,
            num_computed=before.astype(np.int32),
            samples=samples,
            request_ids=table.request_ids[index],
            num_decodes=num_decodes,
            total_num_scheduled_tokens=num_decodes + sum(draft.chunk_sizes),
            num_drafts=num_drafts,
            admitted=tuple(draft.admitted),
            preempted=tuple(draft.preempted),
            finished=tuple(self._life.newly_finished),
        )
        table.add_placeholders(sampling)
        self._life.newly_finished.clear()
        self._life.scheduled_step = self._next_step
        self._next_step += 1
        return output


def _joined(pieces: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.empty(0, np.int32)
