"""Looks prompts up and says where hits can be: the part of the cache manager that changes nothing."""

from jaxkv.cache_request import CacheRequest
from jaxkv.coordinator import Found, make_coordinator
from jaxkv.errors import JaxkvError
from jaxkv.hashing import BlockHasher
from jaxkv.hits import PrefixHit
from jaxkv.managers import Manager
from jaxkv.pool import BlockPool
from jaxkv.specs import FullAttentionSpec


class PrefixLookup:
    """Turns the coordinator's answers into hits.

    alignment: tokens on whose multiples every group can serve a hit.
    """

    def __init__(
        self,
        managers: tuple[Manager, ...],
        num_groups: int,
        pool: BlockPool,
        hasher: BlockHasher,
        alignment: int,
    ) -> None:
        self.coordinator = make_coordinator(managers)
        self._managers = managers
        self._num_groups = num_groups
        self._pool = pool
        self._hasher = hasher
        self._alignment = alignment
        self._cacheable = [m for m in managers if m.cacheable]
        self._full = [m.number for m in self._cacheable if isinstance(m.spec, FullAttentionSpec)]
        self._eagle = [(m.block_size, m.eagle_margin) for m in self._cacheable if m.eagle_margin]

    def find(self, request: CacheRequest) -> PrefixHit:
        """The longest cached prefix of the known tokens, at most all but one of them."""
        hashes = request.block_hashes(self._hasher)
        return self._hit(self.coordinator.find_longest_cache_hit(hashes, request.num_tokens - 1), hashes)

    def without_copies(self, request: CacheRequest, hit: PrefixHit) -> PrefixHit:
        """The longest hit, at most as long as this one, that ends inside no block, so that none is copied."""
        hashes = request.block_hashes(self._hasher)
        while any(part.copy_from >= 0 for part in hit.parts):
            found = self.coordinator.find_longest_cache_hit(hashes, hit.num_tokens - 1)
            hit = self._hit(found, hashes)
        return hit

    def nothing(self) -> PrefixHit:
        return self._hit(self.coordinator.nothing(), [])

    def renew(self, request: CacheRequest, hit: PrefixHit) -> PrefixHit:
        """The same hit with units that are still there; JaxkvError if some have been given out since, or the
        hit is another prompt's or another cache's.
        """
        if not hit.num_tokens and hit.managers is self._managers:
            return hit
        hashes = request.block_hashes(self._hasher)
        if hit.managers is not self._managers or hit.prefix_hash != self._prefix_hash(hit.num_tokens, hashes):
            raise JaxkvError(
                f"the hit of {hit.num_tokens} tokens was not found for request {request.request_id!r} in "
                "this cache; look it up"
            )
        if hit.version == self._pool.version:
            return hit
        found = self.coordinator.find_longest_cache_hit(hashes, hit.num_tokens)
        if found.length < hit.num_tokens:
            raise JaxkvError(
                f"the hit of {hit.num_tokens} tokens for request {request.request_id!r} is stale: only "
                f"{found.length} of them are still cached; look it up again"
            )
        return self._hit(found, hashes)

    def replay_boundary(self, num_tokens: int) -> int:
        """The longest hit that a prompt of `num_tokens` tokens can have when everything of it is cached."""
        unit = self._hasher.hash_block_size
        hashed = self._hasher.num_hash_blocks(num_tokens) * unit
        limit = min(num_tokens - 1, hashed)
        for size, margin in self._eagle:
            # The last whole block (or hash) of the group is the one after the hit.
            limit = min(limit, hashed // min(size, margin) * min(size, margin) - margin)
        return max(0, limit // self._alignment * self._alignment)

    def boundaries(self, request: CacheRequest, hit: PrefixHit | None) -> tuple[int, ...]:
        """Where a later request is expected to resume, ascending: what the retention policy must keep."""
        wanted = {self.replay_boundary(request.num_prompt_tokens), self.replay_boundary(request.num_tokens)}
        if hit is not None:
            wanted.add(hit.branch_point)
        return tuple(sorted(wanted - {0}))

    def _hit(self, found: Found, hashes: list[bytes]) -> PrefixHit:
        by_group = [0] * self._num_groups
        longest, limited_by, branch_point = found.length, None, 0
        for manager in self._managers:
            # What is served without any block says nothing about what is cached.
            alone = found.alone[manager.number] if found.needs_alone[manager.number] else 0
            longest = max(longest, alone)
            for group in manager.group_ids:
                by_group[group] = alone
        if longest > found.length:
            limiting = min(self._cacheable, key=lambda m: found.alone[m.number])
            limited_by = limiting.group_ids[0]
            branch_point = self._branch_point(found, longest)
        return PrefixHit(
            num_tokens=found.length,
            tokens_by_group=tuple(by_group),
            limited_by=limited_by,
            lost_tokens=longest - found.length,
            branch_point=branch_point,
            pending=found.pending,
            parts=found.parts,
            version=self._pool.version,
            prefix_hash=self._prefix_hash(found.length, hashes),
            managers=self._managers,
        )

    def _prefix_hash(self, num_tokens: int, hashes: list[bytes]) -> bytes | None:
        index = num_tokens // self._hasher.hash_block_size
        return hashes[index - 1] if 0 < index <= len(hashes) else None

    def _branch_point(self, found: Found, longest: int) -> int:
        """Where the shared prefix ends, if the hit ends before:
        full attention knows, it keeps every block.
        """
        shared = min([longest, *(found.alone[number] for number in self._full)])
        shared = shared // self._alignment * self._alignment
        return shared if shared > found.length else 0
