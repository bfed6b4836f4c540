"""Which cached content goes first when room is needed, and what the retention policy's wishes are worth.

The pool keeps free cached units in queues; the front of a queue goes first. A policy says in which order the
units that a request gives up join them and at which level, whether content that the retention policy does not
want is kept at all, and whether the end of an answer is a place where a hit is expected. It never makes a hit
wrong: whatever it decides, only content that is still there is found.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jaxkv.errors import JaxkvError
from jaxkv.pool import Units, by_end

if TYPE_CHECKING:
    from jaxkv.cache_manager import KVCacheManager
    from jaxkv.cache_request import CacheRequest


class EvictionPolicy:
    """The default. Content that no expected hit needs goes first, then the least recently used; the units of
    a request by position, over all groups, so that windows and states go together with the full attention
    that they need.

    The end of an answer is kept as a boundary once requests have gone on from ends about half as often as
    from ends of prompts: where clients send answers back changed, or a trace does not tell them, it is never
    hit and would only take room.

    keeps_unwanted: content that the retention policy does not want can be found until its room is needed.
    unwanted_first: that is before any wanted content goes.
    keeps_lower: windows also keep what serves the next lower boundary, where that costs little.
    num_levels: queues of wanted content.
    """

    name = "reach"
    keeps_unwanted = True
    unwanted_first = True
    keeps_lower = True
    num_levels = 1

    def __init__(self) -> None:
        self._ends = _Evidence()

    def attach(self, cache: "KVCacheManager") -> None:
        """Called once, before the first request."""

    def admitted(self, cache: "KVCacheManager", request: "CacheRequest") -> None:
        """A request has got its first blocks."""
        if not cache.retention.is_dense and cache.retained_managers:
            boundary = cache.lookup.replay_boundary(request.num_prompt_tokens)
            self._ends.prompt(request.block_hashes(cache.hasher)[: boundary // cache.plan.hash_block_size])

    def wants_end(self, prefix_hash: bytes) -> bool:
        """Whether the end of what a request computed, a prefix of this hash, is kept as a boundary."""
        return self._ends.end(prefix_hash)

    def order(self, freed: list[Units]) -> NDArray[np.intp]:
        """intp[n]: the units that a request gives up in the order in which they are to go. They are given
        by manager, the last ones first.
        """
        return by_end(freed)

    def level(self, cache: "KVCacheManager", row: int) -> int:
        """The queue that the wanted units of a row join."""
        return 0


class LeastRecentlyUsed(EvictionPolicy):
    """One queue, whatever the retention policy wants; ends of answers are always kept."""

    name = "lru"
    unwanted_first = False

    def wants_end(self, prefix_hash: bytes) -> bool:
        return True


class Published(EvictionPolicy):
    """What vLLM 0.33 does: content that is not wanted is forgotten at once; the units of each group go one
    after the other, the end of the sequence first; ends of answers are not kept.
    """

    name = "vllm"
    keeps_unwanted = False
    keeps_lower = False

    def admitted(self, cache: "KVCacheManager", request: "CacheRequest") -> None:
        """Nothing is learned."""

    def wants_end(self, prefix_hash: bytes) -> bool:
        return False

    def order(self, freed: list[Units]) -> NDArray[np.intp]:
        return np.concatenate([units.leaders for units in freed])


class FlopsPerByte(EvictionPolicy):
    """What would be dear to compute again stays longer, after Marconi (Pan et al., MLSys 2025): the age of
    content is weighed against the FLOPs that its prefix saves for each byte it takes.

    cost: FLOPs of a prompt's first tokens, of the model that is served; their number where it is not known.
    Of each request the saving per unit held is compared with the mean so far: every doubling is a level, and
    a level is worth as much time as a quarter of the pool takes to be used.
    """

    name = "flops"
    num_levels = 5
    share_per_level = 0.25

    def __init__(self, cost: Callable[[int], int] = lambda num_tokens: num_tokens) -> None:
        super().__init__()
        self._cost = cost
        self._mean = 0.0
        self._num = 0

    def attach(self, cache: "KVCacheManager") -> None:
        cache.pool.credits = [
            int(level * self.share_per_level * cache.pool.num_blocks) for level in range(self.num_levels)
        ]

    def level(self, cache: "KVCacheManager", row: int) -> int:
        held = sum(len(manager.units_of(row)) * manager.width for manager in cache.managers)
        saved = self._cost(int(cache.rows.position[row])) / max(1, held)
        self._num += 1
        self._mean += (saved - self._mean) / self._num
        doublings = int(np.floor(np.log2(max(saved, 1e-30) / self._mean)))
        return min(max(self.num_levels // 2 + doublings, 0), self.num_levels - 1)


class _Evidence:
    """How often prompts went on from the end of an earlier prompt, and from the end of an answer.

    Told by hashes, whether or not the content was still there: the last `size` boundaries are remembered.
    """

    size = 2**16

    def __init__(self) -> None:
        # Whether the boundary is the end of an answer.
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        self._made = [0, 0]
        self._hit = [0, 0]

    def prompt(self, hashes: list[bytes]) -> None:
        """A prompt with these hashes, up to its boundary."""
        if not hashes:
            return
        earlier = filter(self._known.__contains__, itertools.islice(reversed(hashes), 1, None))
        last = next(earlier, None)
        if last is not None:
            self._hit[self._known[last]] += 1
        self._note(hashes[-1], is_end=False)

    def end(self, prefix_hash: bytes) -> bool:
        """The end of an answer; returns whether such ends are worth keeping."""
        self._note(prefix_hash, is_end=True)
        prompts_made, ends_made = self._made
        prompts_hit, ends_hit = self._hit
        # One more of each: as long as little is known, ends are kept.
        return 2 * (ends_hit + 1) * (prompts_made + 1) >= (prompts_hit + 1) * (ends_made + 1)

    def _note(self, prefix_hash: bytes, *, is_end: bool) -> None:
        self._made[is_end] += 1
        self._known[prefix_hash] = is_end
        if len(self._known) > self.size:
            self._known.popitem(last=False)


POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in (EvictionPolicy, LeastRecentlyUsed, FlopsPerByte, Published)
}
"""The policies by name."""

DEFAULT_POLICY = EvictionPolicy.name


def make_eviction_policy(name: str) -> EvictionPolicy:
    """The policy of that name; JaxkvError names the known ones."""
    if name not in POLICIES:
        raise JaxkvError(f"unknown eviction policy {name!r}; known are {', '.join(POLICIES)}")
    return POLICIES[name]()
