"""Cached content that lives outside the pool: what a remote or host tier must implement, and one in memory.

A tier knows content by group and prefix hash, never by block id. For a request that has no blocks yet:

    hit = cache.get_computed_blocks(request)
    match = connector.match(request, hit.num_tokens)
    cache.allocate_slots(request, n, hit=hit, num_external_tokens=match.num_tokens,
                         delay_cache_blocks=match.num_tokens > 0)
    connector.load(request.request_id, blocks_to_load(cache, request, hit.num_tokens, match.num_tokens))
    cache.cache_blocks(request, hit.num_tokens + match.num_tokens + n)

A tier that keeps what is computed as soon as it is (`saves_computed`) is given it step by step:

    cache.computed.are_wanted = True    # before the first request
    connector.save_computed(computed_blocks(cache, step))    # after step `cache.clock.step` = step has run
    cache.computed.let_go_up_to(step)

Where the load is asynchronous no tokens are computed (n is 0) until `finished_loads` names the request; only
then `cache.cache_blocks` lets others hit what arrived. One that `failed_loads` names is freed instead. Before
a request is freed, `save` may take `blocks_to_save(cache, request)`; if it says that it reads on, the request
must not be freed before `finished_saves` names it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from jaxkv.cache_manager import KVCacheManager
from jaxkv.cache_request import CacheRequest
from jaxkv.errors import JaxkvError
from jaxkv.managers import MambaManager, Manager, PositionalManager
from jaxkv.specs import cdiv


class ContentKey(NamedTuple):
    """One block's content, or one recurrent state, of one group: the hash is that of the prefix it ends."""

    group: int
    block_hash: bytes


class NamedBlocks(NamedTuple):
    """Where some content is, or is to be put. ids: one block, or all blocks of a state, in order."""

    key: ContentKey
    ids: tuple[int, ...]


class ExternalMatch(NamedTuple):
    """Tokens beyond a local hit that a connector can bring, and whether they take longer than this step."""

    num_tokens: int
    is_async: bool = False


class KVConnector(ABC):
    """A tier below the pool.

    saves_computed: it is given every block and state once its step has run, also those that a window leaves
    behind and those of requests that are preempted; otherwise only what a request holds at its end.

    What its methods raise comes out of `Scheduler.schedule` and loses nothing: a request that was not matched
    or loaded stays in the queue, what was not saved at a request's end is not asked for again, and what
    `save_computed` did not take is offered again; it is raised only where that fails, too. As long as `match`
    or `save_computed` always raise, requests wait. `load` must not raise once it has begun to write.
    """

    saves_computed: ClassVar[bool] = False

    def save_computed(self, blocks: Sequence[NamedBlocks]) -> None:
        """Takes the content of these blocks. It may be written over by any step that starts after the
        call: copy it, or put a copy in line on the device.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no blocks while requests run")

    @abstractmethod
    def match(self, request: CacheRequest, num_local_tokens: int) -> ExternalMatch:
        """How many tokens beyond the local hit it could bring; at least one token is left to compute.

        All that a hit of so many tokens needs must have a name (`needed_content`): a state ends where a
        prefix hash does, a block that the tokens end in is brought as a whole.
        """

    @abstractmethod
    def load(self, request_id: str, blocks: Sequence[NamedBlocks]) -> None:
        """Puts the content into these blocks, now or later (then `finished_loads` says when). Content of
        another make must keep to the page's words (docs/kernels.md): no e4m3 is -0, for example.
        """

    @abstractmethod
    def save(self, request_id: str, blocks: Sequence[NamedBlocks]) -> bool:
        """Takes the content of these blocks. True: it still reads them after the call."""

    @abstractmethod
    def finished_loads(self) -> list[str]:
        """Requests whose asynchronous load has ended since the last call."""

    def failed_loads(self) -> list[str]:
        """Requests whose asynchronous load has ended without all of the content since the last call. What was
        to be loaded is computed instead.
        """
        return []

    @abstractmethod
    def finished_saves(self) -> list[str]:
        """Requests whose blocks `save` no longer reads, since the last call."""


def check_named(cache: KVCacheManager) -> None:
    """Raises JaxkvError for a cache that hashes nothing: content outside it is known by hash alone."""
    if not any(manager.cacheable for manager in cache.managers):
        raise JaxkvError(
            f"a connector knows content by its prefix hash, but none of the {len(cache.plan.groups)} groups "
            f"has any: enable_caching is {cache.enable_caching}"
        )


def needed_content(
    cache: KVCacheManager, request: CacheRequest, num_local_tokens: int, num_tokens: int
) -> list[ContentKey]:
    """What a hit of num_local_tokens + num_tokens tokens needs beyond a local hit of num_local_tokens.

    Raises JaxkvError where some of that has no name.
    """
    hashes = _Hashes(cache, request)
    end = num_local_tokens + num_tokens
    keys: list[ContentKey] = []
    for manager in _cacheable(cache):
        ends = [end] if isinstance(manager, MambaManager) else _block_ends(manager, num_local_tokens, end)
        keys += [ContentKey(group, hashes.of(e)) for group in manager.group_ids for e in ends]
    return keys


def blocks_to_load(
    cache: KVCacheManager, request: CacheRequest, num_local_tokens: int, num_tokens: int
) -> list[NamedBlocks]:
    """The blocks that `allocate_slots` set aside for content from outside.
    JaxkvError if the request has none.

    A block that the local hit ends in is brought as a whole, so it is no longer copied: that would write over
    it.
    """
    row = cache.row_of(request.request_id)
    if not num_tokens:
        return []
    hashes, end = _Hashes(cache, request), num_local_tokens + num_tokens
    found: list[NamedBlocks] = []
    for manager in _cacheable(cache):
        if isinstance(manager, MambaManager):
            found += _named(manager, hashes.of(end), int(manager.current[row]))
            continue
        for block_end in _block_ends(manager, num_local_tokens, end):
            leader = int(manager.ids_at(row, block_end - 1)[0])
            found += _named(manager, hashes.of(block_end), leader)
    cache.copies.drop([block for named in found for block in named.ids])
    return found


def blocks_to_save(cache: KVCacheManager, request: CacheRequest) -> list[NamedBlocks]:
    """Everything the request holds that is complete and can be named: its cached blocks and states.

    What its windows have left behind goes first, so that all of it is there until the request is freed.
    """
    row = cache.row_of(request.request_id)
    cache.upkeep.catch_up()
    found: list[NamedBlocks] = []
    for manager in _cacheable(cache):
        for leader in manager.units_of(row).tolist():
            block_hash = manager.index.hash_of(leader)
            if block_hash is not None:
                found += _named(manager, block_hash, leader)
    return found


def computed_blocks(cache: KVCacheManager, step: int) -> list[NamedBlocks]:
    """What steps up to number `step`, which have run, have completed and `let_go_up_to` has not let go of."""
    return [
        named
        for unit in cache.computed.of_steps_up_to(step)
        for named in _named(unit.manager, unit.block_hash, unit.leader)
    ]


class BlockStore(Protocol):
    """Reads and writes the content of one block id, all layer slots together."""

    def read_block(self, block_id: int) -> bytes: ...
    def write_block(self, block_id: int, content: bytes) -> None: ...


class InMemoryConnector(KVConnector):
    """The reference: keeps whatever it is given in a dictionary and never forgets. Synchronous.

    Raises JaxkvError for a cache without prefix hashes.
    """

    saves_computed = True

    def __init__(self, cache: KVCacheManager, store: BlockStore) -> None:
        check_named(cache)
        self._cache = cache
        self._store = store
        self._contents: dict[ContentKey, tuple[bytes, ...]] = {}

    def __len__(self) -> int:
        """Blocks and states it holds."""
        return len(self._contents)

    def match(self, request: CacheRequest, num_local_tokens: int) -> ExternalMatch:
        # Whole blocks only, also where local hits may end inside one.
        step = self._cache.plan.whole_block_alignment
        hashed = len(request.block_hashes(self._cache.hasher)) * self._cache.plan.hash_block_size
        longest = min(request.num_tokens - 1, hashed) // step * step
        for end in range(longest, num_local_tokens, -step):
            wanted = needed_content(self._cache, request, num_local_tokens, end - num_local_tokens)
            if all(key in self._contents for key in wanted):
                return ExternalMatch(end - num_local_tokens)
        return ExternalMatch(0)

    def load(self, request_id: str, blocks: Sequence[NamedBlocks]) -> None:
        for key, _ in blocks:
            if key not in self._contents:
                raise JaxkvError(
                    f"request {request_id!r} asks for content of group {key.group} that is not here"
                )
        for key, ids in blocks:
            for block_id, content in zip(ids, self._contents[key], strict=True):
                self._store.write_block(block_id, content)

    def save_computed(self, blocks: Sequence[NamedBlocks]) -> None:
        for key, ids in blocks:
            if key not in self._contents:
                self._contents[key] = tuple(self._store.read_block(block_id) for block_id in ids)

    def save(self, request_id: str, blocks: Sequence[NamedBlocks]) -> bool:
        self.save_computed(blocks)
        return False

    def finished_loads(self) -> list[str]:
        return []

    def finished_saves(self) -> list[str]:
        return []


class _Hashes:
    """The hashes of a request's prefixes, by length in tokens. JaxkvError for a length that has none."""

    def __init__(self, cache: KVCacheManager, request: CacheRequest) -> None:
        self._request_id = request.request_id
        self._hashes = request.block_hashes(cache.hasher)
        self._unit = cache.plan.hash_block_size

    def of(self, num_tokens: int) -> bytes:
        index, rest = divmod(num_tokens, self._unit)
        if rest or not 0 < index <= len(self._hashes):
            raise JaxkvError(
                f"content that ends after {num_tokens} tokens of request {self._request_id!r} has no name: "
                f"its prefix hashes end at multiples of {self._unit} up to {len(self._hashes) * self._unit}"
            )
        return self._hashes[index - 1]


def _cacheable(cache: KVCacheManager) -> list[Manager]:
    return [manager for manager in cache.managers if manager.cacheable]


def _block_ends(manager: Manager, start: int, end: int) -> list[int]:
    """Where the blocks end that a hit of `end` tokens needs beyond a local one of `start`."""
    assert isinstance(manager, PositionalManager)  # cacheable and without states
    size, first = manager.block_size, max(start, manager.first_needed(end))
    if first >= end:
        # Whoever goes on there reads nothing before it, though a block may reach beyond it.
        return []
    return [(block + 1) * size for block in range(first // size, cdiv(end, size))]


def _named(manager: Manager, block_hash: bytes, leader: int) -> Iterator[NamedBlocks]:
    """One unit, group by group."""
    ids = manager.pool.members(manager.number, np.array([leader], np.int32))[:, 0].tolist()
    size = manager.blocks_per_state
    for sibling, group in enumerate(manager.group_ids):
        yield NamedBlocks(ContentKey(group, block_hash), tuple(ids[sibling * size : (sibling + 1) * size]))
