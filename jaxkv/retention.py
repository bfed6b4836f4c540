"""Which cached content is wanted: the retention policy.

Everything computed is cached; the policy decides what goes first when room is needed. Content at places where
a hit is expected is *strong*, the rest is *weak* and is given out before any strong content. Full attention
is always strong, because every hit needs it.

A hit is expected at the boundaries of a request (where the same prompt resent would resume, the branch point
that a look-up detected, the end of a finished answer), and at every multiple of the interval where there is
one. In a small pool windows also keep what serves the next lower length, where that is little beside what the
boundary takes in all: a few blocks, computed anyway. Recurrent layers do not: another state costs a whole
state and a chunk that ends there, and under pressure the state at a boundary goes together with the last
block of full attention that it needs, so the hit falls to the next state below.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.errors import JaxkvError
from jaxkv.planning.plan import CachePlan
from jaxkv.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    cdiv,
)

_LOWER_SHARE = 8
"""What serves the next lower boundary as well may take an eighth more at the most."""

_FEW_REQUESTS = 8
"""A larger pool keeps no lower boundaries: it gives up one prompt's end at a time, and the one that is asked
for next is then seldom the one."""


class Retention(NamedTuple):
    """interval: 0 keeps boundaries only (sparse), n also every n tokens (periodic), None everything (dense).

    alignment: hits fall on multiples of it; the next lower boundary is one alignment below.
    lower_from: windows also keep what serves that one below boundaries of so many tokens; None: below none.
    """

    interval: int | None
    alignment: int
    lower_from: int | None = 0

    def check(self) -> None:
        """JaxkvError for a negative interval, or one that no hit can fall on."""
        if self.interval is None:
            return
        if isinstance(self.interval, bool) or not isinstance(self.interval, int) or self.interval < 0:
            raise JaxkvError(f"the retention interval must be None, 0 or positive, not {self.interval!r}")
        if self.interval % self.alignment:
            raise JaxkvError(
                f"the retention interval {self.interval} is not a multiple of {self.alignment} tokens, the "
                "alignment of hits"
            )

    @property
    def is_dense(self) -> bool:
        return self.interval is None

    def wants(self, position: int, boundaries: Sequence[int]) -> bool:
        """Whether a state after `position` tokens is wanted."""
        if self.interval is None or position in boundaries:
            return True
        return self.interval > 0 and position % self.interval == 0

    def wants_exactly(self, position: int, boundaries: Sequence[int]) -> bool:
        """Whether a state is wanted here rather than at any other place:
        dense retention has no such places.
        """
        return position in boundaries or bool(self.interval and position % self.interval == 0)

    def wanted_between(self, start: int, stop: int, boundaries: Sequence[int]) -> list[int]:
        """Positions strictly between at which a state is wanted although no chunk need end there;
        not for dense.
        """
        wanted = {position for position in boundaries if start < position < stop}
        if self.interval:
            wanted.update(range(start // self.interval * self.interval + self.interval, stop, self.interval))
        return sorted(wanted)

    def _with_lower(self, boundary: int) -> tuple[int, ...]:
        if self.lower_from is None or boundary < self.lower_from:
            return (boundary,)
        return (boundary, boundary - self.alignment)

    def wanted_blocks(
        self,
        start: int,
        stop: int,
        block_size: int,
        first_needed: Callable[[int], int],
        max_reach: int,
        boundaries: Sequence[int],
    ) -> NDArray[np.bool_] | bool:
        """Which of the blocks [start, stop) a wanted hit needs: bool[stop - start], or one answer for all of
        them.

        A hit of L needs the tokens from first_needed(L) >= L - max_reach on.

        One alignment below every boundary counts as a boundary too: a pool under pressure first gives up the
        last block of full attention, and then the hit must not fall to nothing.
        """
        if self.interval is None:
            return True
        if not self.interval and (not boundaries or boundaries[-1] <= start * block_size):
            return False
        lowest, highest = start * block_size, stop * block_size + max_reach
        lengths = {
            length
            for boundary in boundaries
            for length in self._with_lower(boundary)
            if lowest < length <= highest
        }
        if self.interval:
            first = lowest // self.interval * self.interval + self.interval
            lengths.update(range(first, highest + 1, self.interval))
        if not lengths:
            return False
        wanted = np.zeros(stop - start, np.bool_)
        for length in lengths:
            needed = first_needed(length)
            if needed < length:
                low, high = needed // block_size, -(-length // block_size)
                wanted[max(low - start, 0) : max(high - start, 0)] = True
        if wanted.all():
            return True
        return wanted if wanted.any() else False


def lower_boundaries_from(plan: CachePlan, alignment: int) -> int | None:
    """The length in tokens from which on keeping the next lower boundary too costs little: what windows keep
    for one more alignment is an eighth at the most of what all groups keep for a boundary there. None: never,
    as in pools of many requests.
    """
    if plan.concurrency > _FEW_REQUESTS:
        return None
    added = kept = 0
    per_token = 0.0
    for group in plan.groups:
        spec = group.spec
        if isinstance(spec, FullAttentionSpec):
            per_token += 1 / spec.block_size
        elif isinstance(spec, MambaSpec):
            kept += group.blocks_per_state
        elif isinstance(spec, SlidingWindowSpec):
            added += cdiv(alignment, spec.block_size)
            kept += spec.num_retained_tokens // spec.block_size
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            # Of a boundary at the end of a chunk it keeps nothing.
            added += cdiv(alignment, spec.block_size)
    missing = max(0, added * _LOWER_SHARE - kept)
    if not per_token:
        return None if missing else 0
    return math.ceil(missing / per_token)
