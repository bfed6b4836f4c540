"""How many blocks requests may still take, from what they hold now and the bounds of their specs."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.specs import (
    AttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    RequestLimits,
    ScratchSpec,
    cdiv,
)

_ENDLESS = 2**40


class Holding(NamedTuple):
    """What one request holds in the groups of one spec.

    leaders: int32[h], its units (blocks at the same place in all groups of the spec). end: units its tokens
    have reached, counting those already given back.
    """

    leaders: NDArray[np.int32]
    end: int


class GroupDemand:
    """The demand of prompts being read for blocks in the `width` groups of one spec (and the blocks of a
    state).

    A window holds what its retained tokens and the tokens in flight touch. The tokens in flight are shared
    by all requests, so k requests hold at most k times the blocks of one token in flight each, plus the
    block boundaries that the other tokens in flight can cross. A request crosses its first after
    `first_crossing` more tokens and the next ones every block_size, so the most are crossed by spending
    tokens on first crossings.
    """

    def __init__(self, spec: KVCacheSpec, width: int, limits: RequestLimits) -> None:
        self.spec = spec
        self.width = width
        self._limits = limits
        # A request takes these blocks when it starts, and no others later.
        self.is_taken_at_start = isinstance(spec, CrossAttentionSpec | ScratchSpec)
        # Blocks that follow the tokens, one after the other; a state or a ring has no such order.
        self.is_positional = isinstance(spec, AttentionSpec) and not self.is_taken_at_start
        self.gives_back = not isinstance(spec, FullAttentionSpec)
        endless = dataclasses.replace(limits, max_model_len=_ENDLESS)

        def most(num_in_flight: int) -> int:
            return spec.max_blocks_per_request(
                dataclasses.replace(endless, max_in_flight_tokens=num_in_flight)
            )

        self._most_of_one_token = most(1) if self.gives_back else _ENDLESS
        crossings = (n for n in range(1, spec.block_size + 1) if most(1 + n) > most(1))
        self._first_crossing = next(crossings, 0) if self.gives_back and self.is_positional else 0

    def at_start(self, num_encoder_tokens: int) -> int:
        """Blocks of a request where all are taken at its start: for the encoder's output, or one ring."""
        cross = isinstance(self.spec, CrossAttentionSpec)
        return (cdiv(num_encoder_tokens, self.spec.block_size) if cross else 1) * self.width

    def positions(self, num_tokens: int) -> int:
        """Blocks that the first `num_tokens` tokens reach, in each group."""
        num_tokens = min(num_tokens + self._limits.num_lookahead_tokens, self._limits.max_model_len)
        if isinstance(self.spec, FullAttentionSpec) and self.spec.dcp_sharded:
            num_tokens = cdiv(num_tokens, self._limits.decode_context_parallel_size)
        return cdiv(num_tokens, self.spec.block_size)

    def most_held(self, num_tokens: int) -> int:
        """The most blocks a request of `num_tokens` tokens holds in each group with one token in flight."""
        return (
            min(self._most_of_one_token, self.positions(num_tokens))
            if self.is_positional
            else (self._most_of_one_token)
        )

    def shared_extra(self, num_requests: int) -> int:
        """The most blocks that the tokens in flight beyond one a request add, in each group."""
        spare = self._limits.max_in_flight_tokens - num_requests
        if not self._first_crossing or spare <= 0:
            return 0
        firsts = min(num_requests, spare // self._first_crossing)
        return firsts + (spare - firsts * self._first_crossing) // self.spec.block_size

    def at_most_wanted(self, num_tokens: Sequence[int], ends: Sequence[int]) -> int:
        """An upper limit of `still_wanted` that looks at no block. ends: see Holding."""
        if not self.is_positional:
            return sum(map(self.most_held, num_tokens)) * self.width
        return max(0, sum(map(self.positions, num_tokens)) - sum(ends)) * self.width

    def still_wanted(
        self, num_tokens: Sequence[int], holdings: Sequence[Holding], references: NDArray[np.int32]
    ) -> int:
        """The most blocks that these requests can still take from the pool until all their tokens are
        computed.

        references: int32[number of held units, in order], how many requests hold each unit. A unit that
        others hold too does not come back when these requests leave it behind, so it is not counted as
        theirs.
        """
        limit = self.at_most_wanted(num_tokens, [holding.end for holding in holdings])
        if not self.gives_back:
            return limit
        bound = sum(map(self.most_held, num_tokens)) + self.shared_extra(len(num_tokens))
        leaders = np.concatenate([holding.leaders for holding in holdings])
        _, first, counts = np.unique(leaders, return_index=True, return_counts=True)
        theirs = int((counts >= references[first]).sum())
        return min(limit, max(0, bound - theirs) * self.width)
