"""A connector whose content is that of the shadow: what it saves, and what it brings back, can be checked."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from jaxkv.cache_manager import KVCacheManager
from jaxkv.cache_request import CacheRequest
from jaxkv.connector import ContentKey, ExternalMatch, KVConnector, NamedBlocks, needed_content
from tests.properties.shadow import POISON, Shadow

#: At once, or some loads and saves meanwhile, or that and an error now and then.
TierKind = Literal["at once", "meanwhile", "unreliable"]

ERROR_RATE = 0.15


class TierError(Exception):
    """The tier cannot be reached."""


class ShadowTier(KVConnector):
    """Remembers, by name, what blocks held when they were saved; one name always stands for one content.

    A load or save that takes longer keeps its blocks: what a save reads must not change, and nobody may be
    given blocks of either. idle: nothing is on its way. being_written: by steps that have not reported.
    """

    def __init__(self, manager: KVCacheManager, shadow: Shadow, rng: random.Random, kind: TierKind) -> None:
        self.kind = kind
        self.being_written: Callable[[], set[int]] = set
        self.counts: Counter[str] = Counter()
        self._manager = manager
        self._shadow = shadow
        self._rng = rng
        self._contents: dict[ContentKey, np.ndarray] = {}
        self._brought: dict[str, set[int]] = {}
        self._loads: dict[str, list[NamedBlocks]] = {}
        self._saves: dict[str, list[NamedBlocks]] = {}
        self._answer = ExternalMatch(0)

    @property
    def idle(self) -> bool:
        return not (self._loads or self._saves)

    def match(self, request: CacheRequest, num_local_tokens: int) -> ExternalMatch:
        self._may_fail("match")
        self._answer = ExternalMatch(0)
        unit = self._manager.plan.hash_block_size
        hashed = len(request.block_hashes(self._manager.hasher)) * unit
        step = self._manager.plan.whole_block_alignment
        for end in range(min(request.num_tokens - 1, hashed) // step * step, num_local_tokens, -step):
            keys = needed_content(self._manager, request, num_local_tokens, end - num_local_tokens)
            if self._rng.random() < 0.9 and all(key in self._contents for key in keys):
                is_async = self.kind != "at once" and self._rng.random() < 0.8
                self._answer = ExternalMatch(end - num_local_tokens, is_async)
                self.counts["matched"] += 1
                break
        return self._answer

    def load(self, request_id: str, blocks: Sequence[NamedBlocks]) -> None:
        self._may_fail("load")
        ids = {block for named in blocks for block in named.ids}
        self._shadow.poison([*ids])
        self._brought[request_id] = ids
        if self._answer.is_async:
            self._loads[request_id] = list(blocks)
        else:
            self._write(blocks)

    def take_brought(self, request_id: str) -> set[int]:
        """Blocks that were given to the request for a load, once."""
        return self._brought.pop(request_id, set())

    def finished_loads(self) -> list[str]:
        self._may_fail("finished_loads")
        done = self._end_some(self._loads, 0.3)
        for blocks in done.values():
            self._write(blocks)
        return list(done)

    def failed_loads(self) -> list[str]:
        self._may_fail("failed_loads")
        if self.kind != "unreliable":
            return []
        lost = self._end_some(self._loads, 0.6)
        for name, blocks in lost.items():
            # Some of it came, and is not to be used.
            self._write(blocks[: len(blocks) // 2])
            self.take_brought(name)
        self.counts["lost"] += len(lost)
        return list(lost)

    def save_computed(self, blocks: Sequence[NamedBlocks]) -> None:
        # The shadow has a step's content as soon as it is scheduled, a device only once it has run.
        early = self.being_written().intersection(block for named in blocks for block in named.ids)
        assert not early, f"blocks {early} are offered before the step that fills them has run"
        self._may_fail("save_computed")
        self._check_kept(blocks)
        self._remember(blocks)

    def save(self, request_id: str, blocks: Sequence[NamedBlocks]) -> bool:
        self._may_fail("save")
        self._remember(blocks)
        if self.kind == "at once" or self._rng.random() < 0.5:
            return False
        self._saves[request_id] = list(blocks)
        return True

    def finished_saves(self) -> list[str]:
        self._may_fail("finished_saves")
        done = self._end_some(self._saves, 0.4)
        for blocks in done.values():
            self._remember(blocks)
        return list(done)

    def _end_some(self, under_way: dict[str, list[NamedBlocks]], rate: float) -> dict[str, list[NamedBlocks]]:
        """What ends now of what is under way. Nobody was given its blocks meanwhile."""
        ended = {name: blocks for name, blocks in under_way.items() if self._rng.random() < rate}
        for name, blocks in ended.items():
            del under_way[name]
            self._check_kept(blocks)
        return ended

    def _may_fail(self, what: str) -> None:
        if self.kind == "unreliable" and self._rng.random() < ERROR_RATE:
            self.counts["errors"] += 1
            raise TierError(what)

    def _remember(self, blocks: Sequence[NamedBlocks]) -> None:
        for key, ids in blocks:
            content = self._shadow.contents[list(ids), : self._slots(key.group)].copy()
            assert (content != POISON).all(), (
                f"group {key.group}: blocks {ids} are saved before they are full"
            )
            known = self._contents.setdefault(key, content)
            assert (known == content).all(), (
                f"group {key.group}: blocks {ids} hold another content of that name"
            )
            self.counts["saved"] += 1

    def _write(self, blocks: Sequence[NamedBlocks]) -> None:
        for key, ids in blocks:
            self._shadow.contents[list(ids), : self._slots(key.group)] = self._contents[key]
            self.counts["loaded"] += 1

    def _slots(self, group: int) -> int:
        rule = self._shadow.rules[group]
        return 1 if rule.kind == "mamba" else rule.block_size

    def _check_kept(self, blocks: Sequence[NamedBlocks]) -> None:
        """Nobody can be given these blocks."""
        pool = self._manager.pool
        free = {*pool.plain_ids().tolist()}
        for leader in pool.free_units().tolist():
            free.update(pool.ids_of(leader, int(pool.owner[leader])))
        for key, ids in blocks:
            assert not free & {*ids}, (
                f"group {key.group}: blocks {ids} are free while they are read or written"
            )


class SavingTier(ShadowTier):
    """It is given what steps complete as soon as they have run."""

    saves_computed = True
