"""Content that a connector brings from outside the pool, or takes there, as the scheduler sees it."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxkv.connector import (
    ExternalMatch,
    KVConnector,
    blocks_to_load,
    blocks_to_save,
    check_named,
    computed_blocks,
    needed_content,
)
from jaxkv.errors import JaxkvError
from jaxkv.request import Request

if TYPE_CHECKING:
    from jaxkv.cache_manager import KVCacheManager
    from jaxkv.hits import PrefixHit

NO_MATCH = ExternalMatch(0)


class LoadedTokens(NamedTuple):
    """A request whose first `num_tokens` tokens are now there."""

    request_id: str
    num_tokens: int


class Transfers:
    """Loads and saves of all requests; without a connector none `are_possible`.

    A connector that keeps what is computed is given it as soon as its step has run, before anything of it is
    given out again. A request whose blocks are being loaded or saved keeps them until the connector has said
    that it is done.

    An error never cuts a step or the taking of its results in half: where it would, it is put off until the
    next step is to be put together, and is raised before anything of that is done.
    """

    def __init__(self, connector: KVConnector | None, cache_manager: "KVCacheManager") -> None:
        self._connector = connector
        self.are_possible = connector is not None
        self._kv = cache_manager
        self._loaded_tokens: dict[str, int] = {}
        self._saving: dict[str, Request] = {}
        self._failed: set[str] = set()
        self._errors: deque[Exception] = deque()
        if connector is not None:
            check_named(cache_manager)
            cache_manager.computed.are_wanted = connector.saves_computed

    @property
    def frees_pending(self) -> bool:
        """Whether blocks will come back once a step in flight has reported."""
        return self._kv.computed.some_come_back

    def put_off(self, error: Exception) -> None:
        """Has `raise_put_off` raise it."""
        self._errors.append(error)

    def raise_put_off(self) -> None:
        """Raises the first error that was put off and not raised yet, if there is one."""
        if self._errors:
            raise self._errors.popleft()

    def save_computed(self, cache_step: int) -> None:
        """Offers what the cache's steps up to this number have completed: they have run. If the connector
        raises, all of it is kept to be offered again.
        """
        if self._connector is not None and self._kv.computed:
            self._connector.save_computed(computed_blocks(self._kv, cache_step))
            self._kv.computed.let_go_up_to(cache_step)

    def holds_id(self, request_id: str) -> bool:
        return request_id in self._loaded_tokens or request_id in self._saving

    def is_loading(self, request: Request) -> bool:
        return request.request_id in self._loaded_tokens

    def match(self, request: Request, hit: "PrefixHit") -> ExternalMatch:
        """What the connector can add to a hit. Raises JaxkvError if it leaves no token to compute, or offers
        what has no name.
        """
        if self._connector is None or request.request_id in self._failed:
            return NO_MATCH
        match = self._connector.match(request, hit.num_tokens)
        if match.num_tokens < 0 or hit.num_tokens + match.num_tokens >= request.num_tokens:
            raise JaxkvError(
                f"the connector offers {match.num_tokens} tokens beyond {hit.num_tokens} of request "
                f"{request.request_id!r}, which has {request.num_tokens}: one must be left to compute"
            )
        if not match.num_tokens:
            return NO_MATCH
        needed_content(self._kv, request, hit.num_tokens, match.num_tokens)
        return match

    def load(self, request: Request, hit: "PrefixHit", match: ExternalMatch) -> None:
        """Fills the blocks that were given to the request for what was matched. If the connector raises, the
        request gives its blocks back.
        """
        if self._connector is None or not match.num_tokens:
            return
        blocks = blocks_to_load(self._kv, request, hit.num_tokens, match.num_tokens)
        try:
            self._connector.load(request.request_id, blocks)
        except BaseException:
            self._kv.free(request)
            raise
        if match.is_async:
            self._loaded_tokens[request.request_id] = hit.num_tokens + match.num_tokens

    def save(self, request: Request) -> bool:
        """Offers the blocks of a request that has ended. True: they must be kept until `take_saved`. An error
        of the connector is put off: then they are not saved.
        """
        if self._connector is None:
            return False
        blocks = blocks_to_save(self._kv, request)
        try:
            reads_on = self._connector.save(request.request_id, blocks)
        except Exception as error:
            self.put_off(error)
            return False
        if reads_on:
            self._saving[request.request_id] = request
        return reads_on

    def take_loaded(self) -> list[LoadedTokens]:
        """What asynchronous loads have brought since the last call."""
        if self._connector is None or not self._loaded_tokens:
            return []
        loaded = self._take(self._connector.finished_loads(), self._loaded_tokens, "loading")
        return [LoadedTokens(*one) for one in loaded.items()]

    def take_failed(self) -> list[str]:
        """Requests whose asynchronous loads have failed since the last call. The connector is not asked about
        them again.
        """
        if self._connector is None or not self._loaded_tokens:
            return []
        failed = self._take(self._connector.failed_loads(), self._loaded_tokens, "loading")
        self._failed.update(failed)
        return list(failed)

    def forget(self, request_id: str) -> None:
        """The request has ended: another one may have its id."""
        self._failed.discard(request_id)

    def take_saved(self) -> list[Request]:
        """Ended requests whose blocks the connector no longer reads."""
        if self._connector is None or not self._saving:
            return []
        return list(self._take(self._connector.finished_saves(), self._saving, "saving").values())

    def _take[T](self, request_ids: Sequence[str], waiting: dict[str, T], what: str) -> dict[str, T]:
        """Takes these requests out of those that wait; a JaxkvError about any other is put off."""
        taken: dict[str, T] = {}
        for request_id in request_ids:
            if request_id in waiting:
                taken[request_id] = waiting.pop(request_id)
            else:
                message = f"the connector is done {what} request {request_id!r}, which it was not asked for"
                self.put_off(JaxkvError(message))
        return taken
