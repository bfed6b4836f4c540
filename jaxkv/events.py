"""What a cache tells the outside about its blocks: stored, removed, all cleared.
Per group, as routers want it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxkv.hashing import Hashable
from jaxkv.specs import KVCacheSpec, SlidingWindowSpec


@dataclass(frozen=True, kw_only=True)
class BlockStored:
    """Consecutive blocks, or one state, that can be hit from now on.

    block_hashes: of each block, oldest first; never empty. parent_block_hash: of the block before them, None
    at the start. token_ids: of all the blocks (for a state: of its last block). block_size: tokens of one of
    them.
    group_idx, kv_cache_spec_kind, kv_cache_spec_sliding_window: the group and what its layers keep.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    group_idx: int
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None
    lora_name: str | None


@dataclass(frozen=True, kw_only=True)
class BlockRemoved:
    """Blocks of a group that can no longer be hit."""

    block_hashes: tuple[bytes, ...]
    group_idx: int


@dataclass(frozen=True, kw_only=True)
class AllBlocksCleared:
    """Nothing can be hit any more."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """Collects events until they are taken."""

    def __init__(self) -> None:
        self._events: list[KVCacheEvent] = []

    def take(self) -> list[KVCacheEvent]:
        """All events since the last call, in the order in which they happened."""
        events, self._events = self._events, []
        return events

    def stored(
        self,
        request: Hashable,
        group_ids: Sequence[int],
        spec: KVCacheSpec,
        hashes: list[bytes],
        parent: bytes | None,
        end: int,
        block_size: int,
    ) -> None:
        """Blocks of `block_size` tokens that end at token `end` were cached in these groups."""
        if not hashes:
            return
        tokens = tuple(request.token_ids(max(0, end - len(hashes) * block_size), end).tolist())
        window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
        for group in group_ids:
            self._events.append(
                BlockStored(
                    block_hashes=tuple(hashes),
                    parent_block_hash=parent,
                    token_ids=tokens,
                    block_size=block_size,
                    group_idx=group,
                    kv_cache_spec_kind=spec.kind,
                    kv_cache_spec_sliding_window=window,
                    lora_name=request.lora_name,
                )
            )

    def removed(self, group_ids: Sequence[int], hashes: list[bytes]) -> None:
        """No block of these groups has these hashes any more."""
        if hashes:
            self._events.extend(BlockRemoved(block_hashes=tuple(hashes), group_idx=g) for g in group_ids)

    def mark(self) -> int:
        """The place in the log, for `cleared`."""
        return len(self._events)

    def cleared(self, mark: int) -> None:
        """Everything was forgotten: one event instead of those recorded since `mark`."""
        del self._events[mark:]
        self._events.append(AllBlocksCleared())
