"""Counters of a cache, under vLLM's names, and a sample of how long blocks stay."""

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.errors import JaxkvError
from jaxkv.hits import PrefixHit


@dataclass
class PrefixCacheStats:
    """Counted when a request gets its first blocks, in tokens. Resumed requests are counted apart.

    queries, hits: tokens looked up and found by new requests. requests: their number.
    preempted_queries, preempted_hits, preempted_requests: the same of requests that had lost their blocks.
    lost_tokens: by group, tokens that this group kept the other groups' hits from serving.
    too_short: look-ups of prompts too short to hit anything.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    too_short: int = 0
    lost_tokens: dict[int, int] = field(default_factory=dict)

    def record(self, num_tokens: int, hit: PrefixHit, *, preempted: bool, alignment: int) -> None:
        """One admission: `num_tokens` known tokens were looked up."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += hit.num_tokens
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += hit.num_tokens
        if num_tokens <= alignment:
            self.too_short += 1
        if hit.limited_by is not None:
            self.lost_tokens[hit.limited_by] = self.lost_tokens.get(hit.limited_by, 0) + hit.lost_tokens

    def counters(self) -> dict[str, int]:
        """The counters by the names of vLLM's metrics where it has one."""
        return {
            "prefix_cache_queries": self.queries,
            "prefix_cache_hits": self.hits,
            "prefix_cache_requests": self.requests,
            "prefix_cache_preempted_queries": self.preempted_queries,
            "prefix_cache_preempted_hits": self.preempted_hits,
            "prefix_cache_preempted_requests": self.preempted_requests,
            "prefix_cache_too_short": self.too_short,
            **{f"prefix_cache_lost_tokens_group_{g}": n for g, n in sorted(self.lost_tokens.items())},
        }


class Residency(NamedTuple):
    """The life of one sampled block, in steps. reuse_gaps: between one use and the next."""

    lifetime: int
    idle: int
    reuse_gaps: tuple[int, ...]


class ResidencySampler:
    """Follows a fixed part of the cached units from being cached to losing their content.

    rate: part of the block ids whose units are followed, in (0, 1]. Which ones depends on the id alone, so a
    run can be repeated.
    """

    def __init__(self, rate: float) -> None:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0.0 < rate <= 1.0:
            raise JaxkvError(f"the residency sampling rate must be in (0, 1], not {rate!r}")
        self._every = max(1, round(1.0 / rate))
        self._uses: dict[int, list[int]] = {}
        self._finished: list[Residency] = []

    def _sampled(self, leaders: NDArray[np.integer]) -> list[int]:
        return leaders[leaders % self._every == 0].tolist()

    def cached(self, leaders: NDArray[np.integer], step: int) -> None:
        for leader in self._sampled(leaders):
            self._uses[leader] = [step]

    def hit(self, leaders: NDArray[np.integer], step: int) -> None:
        for leader in self._sampled(leaders):
            if leader in self._uses:
                self._uses[leader].append(step)

    def evicted(self, leaders: NDArray[np.integer], step: int) -> None:
        for leader in self._sampled(leaders):
            uses = self._uses.pop(leader, None)
            if uses:
                gaps = tuple(b - a for a, b in itertools.pairwise(uses))
                self._finished.append(Residency(step - uses[0], step - uses[-1], gaps))

    def take(self) -> list[Residency]:
        """The lives that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished
