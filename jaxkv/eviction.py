"""Which cached content goes first when room is needed, and what the retention policy's wishes are worth.

The pool keeps free cached units in queues; the front of a queue goes first. A policy says in which order the
units that a request gives up join them and at which level, whether content that the retention policy does not
want is kept at all, and whether the end of an answer is a place where a hit is expected. It never makes a hit
wrong: whatever it decides, only content that is still there is found.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jaxkv.continuations import Continuations, Place
from jaxkv.errors import JaxkvError
from jaxkv.managers import HitPart
from jaxkv.pool import Units, by_end
from jaxkv.retention import LOWER_SHARE, lower_boundaries_from

if TYPE_CHECKING:
    from jaxkv.cache_manager import KVCacheManager
    from jaxkv.cache_request import CacheRequest


class EvictionPolicy:
    """The default. Content that no expected hit needs goes first, then the least recently used; the units of
    a request by position, over all groups, so that windows and states go together with the full attention
    that they need.

    What is expected is learned from what prompts went on from, by their hashes. The end of an answer is kept
    as a boundary once requests go on from such ends at least half as often as from ends of prompts: where
    clients send answers back changed, or a trace does not tell them, answers only take room. The next
    lower boundary is kept, too, of windows alone and where it costs little, as long as prompts often part
    from earlier ones right before their ends, which chat templates may make them do.

    keeps_unwanted: content that the retention policy does not want can be found until its room is needed.
    unwanted_first: that is before any wanted content goes.
    by_reach: what lies beyond the last boundary of a request is not wanted, and what serves its boundaries
    goes with its end, also where it was let go of before.
    num_levels: queues of wanted content.
    """

    name = "reach"
    keeps_unwanted = True
    unwanted_first = True
    by_reach = True
    num_levels = 1

    def __init__(self) -> None:
        self._continuations = Continuations()
        self._lower_from: int | None = None

    def attach(self, cache: "KVCacheManager") -> None:
        """Called once, before the first request."""
        self._lower_from = lower_boundaries_from(cache.plan, cache.chunk_alignment)

    def forget(self) -> None:
        """What was learned from earlier requests is forgotten, as if there had been none."""
        self._continuations = Continuations()

    def admitted(self, cache: "KVCacheManager", request: "CacheRequest", parts: Sequence[HitPart]) -> None:
        """A request has got its first blocks, these parts of a hit among them."""
        if cache.retention.is_dense:
            return
        for part in parts:
            # A place that was hit is one where hits are to be expected.
            cache.pool.strong[part.leaders] = True
        unit, step = cache.hasher.hash_block_size, cache.chunk_alignment
        boundary = cache.lookup.replay_boundary(request.num_prompt_tokens)
        # A preempted request that comes again says nothing new.
        if boundary and not request.num_preemptions:
            hashes, learned = request.block_hashes(cache.hasher), self._continuations
            learned.prompt(hashes[: boundary // unit - 1])
            learned.boundary(hashes[boundary // unit - 1], Place.PROMPT)
            if self._lower_from is not None and boundary > step:
                learned.boundary(hashes[(boundary - step) // unit - 1], Place.BELOW_PROMPT)

    def wants_end(self, prefix_hash: bytes) -> bool:
        """Whether the end of an answer, which ends a prefix of this hash, is kept as a boundary."""
        learned = self._continuations
        learned.boundary(prefix_hash, Place.ANSWER)
        # Not before one was hit: until then most room is unused, and what is not wanted can be found as well.
        if not learned.continued(Place.ANSWER):
            return False
        return 2 * learned.rate(Place.ANSWER) >= learned.rate(Place.PROMPT)

    def with_lower(self, boundaries: tuple[int, ...], alignment: int) -> tuple[int, ...]:
        """The boundaries that windows are kept for: these, and lower ones where they are worth it.
        Ascending.
        """
        # One more of each: as long as little is known, they are kept.
        below, others = (1 + self._continuations.continued(p) for p in (Place.BELOW_PROMPT, Place.PROMPT))
        if self._lower_from is None or LOWER_SHARE * below < others:
            return boundaries
        lower = [boundary - alignment for boundary in boundaries if boundary >= self._lower_from]
        return tuple(sorted({*boundaries, *lower} - {0}))

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
    by_reach = False

    def wants_end(self, prefix_hash: bytes) -> bool:
        return True


class Published(EvictionPolicy):
    """What vLLM 0.33 does: content that is not wanted is forgotten at once; the units of each group go one
    after the other, the end of the sequence first; ends of answers are not kept.
    """

    name = "vllm"
    keeps_unwanted = False
    by_reach = False

    def admitted(self, cache: "KVCacheManager", request: "CacheRequest", parts: Sequence[HitPart]) -> None:
        """Nothing is learned."""

    def wants_end(self, prefix_hash: bytes) -> bool:
        return False

    def with_lower(self, boundaries: tuple[int, ...], alignment: int) -> tuple[int, ...]:
        return boundaries

    def order(self, freed: list[Units]) -> NDArray[np.intp]:
        return np.concatenate([np.asarray(units.leaders, np.intp) for units in freed])


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
        super().attach(cache)
        cache.pool.credits = [
            int(level * self.share_per_level * cache.pool.num_blocks) for level in range(self.num_levels)
        ]

    def forget(self) -> None:
        super().forget()
        self._mean = 0.0
        self._num = 0

    def level(self, cache: "KVCacheManager", row: int) -> int:
        held = sum(len(manager.units_of(row)) * manager.width for manager in cache.managers)
        saved = self._cost(int(cache.rows.position[row])) / max(1, held)
        self._num += 1
        self._mean += (saved - self._mean) / self._num
        # The exponent itself: a logarithm's last digit differs from machine to machine.
        doublings = math.frexp(max(saved, 1e-30) / self._mean)[1] - 1
        return min(max(self.num_levels // 2 + doublings, 0), self.num_levels - 1)


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
