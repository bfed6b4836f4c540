"""Which cached content is wanted: the retention policy.

Everything computed is cached; the policy decides what goes first when room is needed. Content at places where
a hit is expected is *strong*, the rest is *weak* and is given out before any strong content. Full attention
is strong while its request runs; what lies beyond the last boundary may become weak at its end.

A hit is expected at the boundaries of a request (where the same prompt resent would resume, the branch point
that a look-up detected, the end of a finished answer), at every multiple of the interval where there is one,
and wherever there has been one. The eviction policy may have windows also keep what serves the next lower
boundary: a few blocks, computed anyway. Recurrent layers do not: another state costs a whole state and a
chunk that ends there.
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

LOWER_SHARE = 8
"""What serves the next lower boundary as well may take an eighth more at the most."""


class Retention(NamedTuple):
    """interval: 0 keeps boundaries only (sparse), n also every n tokens (periodic), None everything (dense).

    alignment: hits fall on multiples of it.
    """

    interval: int | None
    alignment: int

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

    def last_wanted(self, known: int, boundaries: Sequence[int]) -> int:
        """The highest position up to `known` at which a hit is wanted; not for dense.

        boundaries: ascending.
        """
        last = boundaries[-1] if boundaries else 0
        return max(last, known // self.interval * self.interval) if self.interval else last

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

        boundaries: ascending. A hit of L needs the tokens from first_needed(L) >= L - max_reach on.
        """
        if self.interval is None:
            return True
        if not self.interval and (not boundaries or boundaries[-1] <= start * block_size):
            return False
        lowest, highest = start * block_size, stop * block_size + max_reach
        lengths = {boundary for boundary in boundaries if lowest < boundary <= highest}
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
    for one more alignment is an eighth at the most of what all groups keep for a boundary there. None: never.
    """
    added = kept = 0
    per_token = 0.0
    for group in plan.groups:
        spec = group.spec
        if isinstance(spec, FullAttentionSpec):
            per_token += 1 / spec.block_size
        elif isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
            # A lower boundary would need a state there, which none is kept for.
            return None
        elif isinstance(spec, SlidingWindowSpec):
            added += cdiv(alignment, spec.block_size)
            kept += spec.num_retained_tokens // spec.block_size
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            # Of a boundary at the end of a chunk it keeps nothing.
            added += cdiv(alignment, spec.block_size)
    missing = max(0, added * LOWER_SHARE - kept)
    if not per_token:
        return None if missing else 0
    return math.ceil(missing / per_token)
