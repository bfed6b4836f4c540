"""From the queue to a row, back to the queue, to the end: the one place where requests change state.

A request's blocks are given back at once, unless a scheduled step that uses them has not reported yet: then
they are kept until it has, so that no block is handed out while the device may still write it.
"""

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.request import Request, RequestStatus
from jaxkv.request_table import RequestTable
from jaxkv.scheduling.running import RunningRows
from jaxkv.scheduling.transfers import Transfers
from jaxkv.scheduling.waiting import ServiceKey, WaitingQueue

if TYPE_CHECKING:
    from jaxkv.cache_manager import KVCacheManager
    from jaxkv.hits import PrefixHit


class _DeferredFree(NamedTuple):
    last_step: int
    request: Request


class _Loading(NamedTuple):
    """A request whose blocks a connector is filling: its status before, and what it begins with."""

    request: Request
    status: RequestStatus
    hit: "PrefixHit"
    num_external_tokens: int


class Lifecycle:
    """Every live request, where it is, and the counters of what happened to them.

    table: tokens and counters of rows. running: rows that take part in steps. waiting: the queue. A request
    whose blocks a connector is filling is in neither, but has a row.
    scheduled_step, settled_step: numbers of the last step scheduled, and of the last whose results are in.
    """

    def __init__(self, cache_manager: "KVCacheManager", transfers: Transfers, table: RequestTable) -> None:
        self.cache_manager = cache_manager
        self._transfers = transfers
        self.table = table
        self.running = RunningRows()
        self.waiting = WaitingQueue()
        self.scheduled_step = self.settled_step = -1
        self.num_preemptions = 0
        self.num_finished = 0
        self.num_prompt_tokens = 0
        self.newly_finished: list[str] = []
        self._keys: dict[str, ServiceKey] = {}
        self._requests: dict[str, Request] = {}
        self._loading: dict[str, _Loading] = {}
        self._deferred: deque[_DeferredFree] = deque()
        self._num_added = 0

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def frees_pending(self) -> bool:
        """Whether blocks will come back once a step in flight has reported."""
        return bool(self._deferred) or self._transfers.frees_pending

    def holds_id(self, request_id: str) -> bool:
        """Whether the id is in use, by a live request or by blocks not yet given back."""
        return (
            request_id in self._requests
            or self._transfers.holds_id(request_id)
            or any(deferred.request.request_id == request_id for deferred in self._deferred)
        )

    @property
    def num_with_blocks(self) -> int:
        """Requests that run or are being loaded."""
        return len(self.running) + len(self._loading)

    def rows_wanting_blocks(self) -> NDArray[np.int32]:
        """int32[n]: rows whose known tokens have not all been given blocks, those being loaded included."""
        rows = self.running.rows
        rows = rows[self.table.prefilling[rows]]
        if self._loading:
            rows = np.append(
                rows, np.array([loading.request.row for loading in self._loading.values()], np.int32)
            )
        return rows[self.cache_manager.rows.position[rows] < self.table.num_tokens[rows]]

    def find(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Puts a new request in the queue."""
        arrival = self._num_added if request.arrival is None else request.arrival
        self._keys[request.request_id] = key = ServiceKey(request.priority, arrival, self._num_added)
        self._num_added += 1
        self._requests[request.request_id] = request
        self.waiting.add(request, key)

    def admit(self, request: Request, hit: "PrefixHit", num_external_tokens: int = 0) -> int:
        """Moves a request that has just been given blocks from the queue to its row, which is returned.

        It starts with the tokens of its hit and those of a connector; while the latter are on their way it
        does not run.
        """
        key = self._keys[request.request_id]
        self.waiting.remove(key)
        row = self.cache_manager.row_of(request.request_id)
        request.bind(self.table, row)
        request.num_computed_tokens = hit.num_tokens + num_external_tokens
        if self._transfers.is_loading(request):
            loading = _Loading(request, request.status, hit, num_external_tokens)
            self._loading[request.request_id] = loading
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        else:
            self._begin(request, row, hit, num_external_tokens)
        return row

    def _begin(self, request: Request, row: int, hit: "PrefixHit", num_external_tokens: int) -> None:
        """The request takes part in steps from now on; what it begins with is counted."""
        computed = hit.num_tokens + num_external_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens, request.prefix_hit = computed, hit
            self.num_prompt_tokens += request.num_prompt_tokens
        else:
            request.num_cached_tokens_on_resume += computed
        request.num_external_tokens += num_external_tokens
        request.status = RequestStatus.RUNNING
        self.running.add(row, self._keys[request.request_id])

    def poll_transfers(self) -> None:
        """Requests whose content has arrived begin to run, those whose load has failed go back to the queue;
        blocks that have been saved are given back.
        """
        if not self._transfers.are_possible:
            return
        for loaded in self._transfers.take_loaded():
            request, _, hit, num_external_tokens = self._loading.pop(loaded.request_id)
            if request.is_finished:
                self._free(request)
                continue
            self.cache_manager.cache_blocks(request, loaded.num_tokens)
            assert request.row is not None
            self._begin(request, request.row, hit, num_external_tokens)
        for request_id in self._transfers.take_failed():
            request, status, _, _ = self._loading.pop(request_id)
            if request.is_finished:
                self._transfers.forget(request_id)
            else:
                request.status = status
                self.waiting.add(request, self._keys[request_id])
            self._free(request)
        for request in self._transfers.take_saved():
            self._free(request)
        self._save_computed()

    def preempt(self, row: int) -> Request:
        """Sends a running row back to the queue without its blocks;
        what it had is recomputed, or found in the cache.
        """
        request = self.table.request(row)
        key = self._keys[request.request_id]
        self.running.remove(key)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(request, key)
        self._give_back(request)
        return request

    def end(self, request: Request, status: RequestStatus) -> None:
        """Ends a live request, wherever it is."""
        key = self._keys.pop(request.request_id)
        del self._requests[request.request_id]
        was_running = request.status is RequestStatus.RUNNING
        if was_running:
            self.running.remove(key)
        elif request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            self.waiting.remove(key)
        request.status = status
        self._transfers.forget(request.request_id)
        self.num_finished += 1
        self.newly_finished.append(request.request_id)
        if request.row is not None:
            self.table.retire_row(request.row)
        if was_running:
            self._give_back(request)
        self._try_to_save_computed()

    def settle(self, step: int) -> None:
        """The results of `step` are in: blocks kept for it are given back."""
        self.settled_step = step
        while self._deferred and self._deferred[0].last_step <= step:
            self._save_and_free(self._deferred.popleft().request)
        self._try_to_save_computed()

    def _try_to_save_computed(self) -> None:
        """`_save_computed` where an error would cost results: `poll_transfers` offers the same again."""
        with suppress(Exception):
            self._save_computed()

    def _save_computed(self) -> None:
        """Offers a connector what steps that have run completed. Not while a step is being put together."""
        if not self._transfers.are_possible:
            return
        num_in_flight = self.scheduled_step - self.settled_step
        self._transfers.save_computed(self.cache_manager.clock.step - num_in_flight)

    def _give_back(self, request: Request) -> None:
        assert request.row is not None
        last_step = int(self.table.last_step[request.row])
        if last_step > self.settled_step:
            self._deferred.append(_DeferredFree(last_step, request))
        else:
            self._save_and_free(request)

    def _save_and_free(self, request: Request) -> None:
        if not (request.is_finished and self._transfers.save(request)):
            self._free(request)

    def _free(self, request: Request) -> None:
        self.cache_manager.free(request, resumes=not request.is_finished)
        request.unbind()
        if not request.is_finished:
            request.num_computed_tokens = 0
