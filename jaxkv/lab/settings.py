"""How a trace is replayed."""

from dataclasses import dataclass

from jaxkv.errors import JaxkvError
from jaxkv.eviction import DEFAULT_POLICY, make_eviction_policy
from jaxkv.hashing import make_hasher
from jaxkv.lab.content import SeenPrefixes
from jaxkv.lab.trace import Trace
from jaxkv.planning.plan import CachePlan
from jaxkv.specs import KVCacheSpec, MambaSpec, cdiv

CLOCKS = ("sequential", "trace", "as-fast-as-possible")

MAX_POOL_BLOCKS = 2**26
"""The host's accounts of a pool take about a hundred bytes a block."""


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """clock: when requests arrive. sequential: each when the one before it has ended; trace: at their times,
    while every step takes `step_seconds`; as-fast-as-possible: all at once, in their order.
    retention_interval: see jaxkv.retention. eviction: a name of jaxkv.eviction.POLICIES.
    max_num_seqs, max_num_batched_tokens: of the scheduler.
    """

    clock: str = "sequential"
    step_seconds: float = 0.02
    retention_interval: int | None = 0
    eviction: str = DEFAULT_POLICY
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048

    def __post_init__(self) -> None:
        if self.clock not in CLOCKS:
            raise JaxkvError(f"unknown clock {self.clock!r}; known are {', '.join(CLOCKS)}")
        if not self.step_seconds > 0:
            raise JaxkvError(f"a step must take more than 0 seconds, got {self.step_seconds}")
        # Before the trace is replayed with any of a sweep's other settings.
        make_eviction_policy(self.eviction)


def blocks_for_everything(plan: CachePlan, trace: Trace) -> int:
    """Blocks with which nothing need ever be evicted while the trace is replayed.

    Raises JaxkvError where the host could not keep account of so many.
    """
    total = 1 + sum(plan.blocks_per_request)
    seen, hasher = SeenPrefixes(), make_hasher("sha256", plan.hash_block_size)
    for request in trace.requests:
        keys = request.content.keys(hasher)
        num_known = seen.shared(keys)
        seen.add(keys[num_known:])
        tokens = request.num_prompt_tokens + request.num_output_tokens
        new = tokens - num_known * request.content.unit(hasher)
        total += sum(_units(group.spec, new, plan) * group.blocks_per_state for group in plan.groups)
    if total > MAX_POOL_BLOCKS:
        raise JaxkvError(
            f"keeping everything of this trace takes {total} blocks of this plan, more than the "
            f"{MAX_POOL_BLOCKS} that can be accounted for: use a larger --block-size, or --memory"
        )
    return total


def _units(spec: KVCacheSpec, num_tokens: int, plan: CachePlan) -> int:
    """The most units that computing so many tokens leaves behind in a group."""
    units = cdiv(num_tokens, spec.block_size) + 1
    if isinstance(spec, MambaSpec):
        # Also a state for each chunk, boundary and branch.
        units += cdiv(num_tokens, plan.max_in_flight_tokens) + 4
    return units
