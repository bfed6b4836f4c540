"""Connectors of the tests: slow ones, which say when they are done, and some that cannot be reached."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxkv.cache_manager import KVCacheManager
from jaxkv.cache_request import CacheRequest
from jaxkv.connector import ExternalMatch, InMemoryConnector, KVConnector, NamedBlocks
from tests.scheduling.serving import Serving, full, mamba, window


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 1000 + 7 * i) % 5000 for i in range(length)]


class Store:
    """Blocks of the pool as bytes that name their id, so that a test sees what was copied where."""

    def __init__(self) -> None:
        self.written: dict[int, bytes] = {}

    def read_block(self, block_id: int) -> bytes:
        return str(block_id).encode()

    def write_block(self, block_id: int, content: bytes) -> None:
        self.written[block_id] = content


class SlowConnector(KVConnector):
    """Offers a fixed number of tokens; says when a test tells it to that loads and saves are done."""

    def __init__(self, num_tokens: int, *, slow_saves: bool = False) -> None:
        self.num_tokens = num_tokens
        self.slow_saves = slow_saves
        self.loads: list[str] = []
        self.saves: list[str] = []
        self.done_loads: list[str] = []
        self.done_saves: list[str] = []
        self.lost_loads: list[str] = []

    def match(self, request: CacheRequest, num_local_tokens: int) -> ExternalMatch:
        return ExternalMatch(max(0, self.num_tokens - num_local_tokens), is_async=True)

    def load(self, request_id: str, blocks: Sequence[NamedBlocks]) -> None:
        self.loads.append(request_id)

    def save(self, request_id: str, blocks: Sequence[NamedBlocks]) -> bool:
        self.saves.append(request_id)
        return self.slow_saves

    def finished_loads(self) -> list[str]:
        done, self.done_loads = self.done_loads, []
        return done

    def failed_loads(self) -> list[str]:
        lost, self.lost_loads = self.lost_loads, []
        return lost

    def finished_saves(self) -> list[str]:
        done, self.done_saves = self.done_saves, []
        return done


def slow(connector: SlowConnector, num_blocks: int = 40) -> Serving:
    return Serving([full(), window(8)], num_blocks, make_connector=lambda cache: connector)


class Unreliable(InMemoryConnector):
    """Raises OSError whenever `is_gone` says so of what it is asked for."""

    def __init__(self, cache: KVCacheManager, is_gone: Callable[[str], bool]) -> None:
        super().__init__(cache, Store())
        self._is_gone = is_gone

    def _ask(self, what: str) -> None:
        if self._is_gone(what):
            raise OSError(f"{what}: gone")

    def match(self, request: CacheRequest, num_local_tokens: int) -> ExternalMatch:
        self._ask("match")
        return super().match(request, num_local_tokens)

    def load(self, request_id: str, blocks: Sequence[NamedBlocks]) -> None:
        self._ask("load")
        super().load(request_id, blocks)

    def save_computed(self, blocks: Sequence[NamedBlocks]) -> None:
        self._ask("save_computed")
        super().save_computed(blocks)

    def save(self, request_id: str, blocks: Sequence[NamedBlocks]) -> bool:
        self._ask("save")
        super().save_computed(blocks)
        return False


def unreliable(is_gone: Callable[[str], bool], **options: Any) -> Serving:
    specs = [full(), window(8), mamba()]
    return Serving(specs, 60, make_connector=lambda cache: Unreliable(cache, is_gone), **options)
