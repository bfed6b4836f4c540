"""What a scheduler may do in one step."""

from dataclasses import dataclass

from jaxkv.errors import JaxkvError
from jaxkv.planning.plan import CachePlan
from jaxkv.specs import check_int


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step, under vLLM's names.

    max_num_seqs: requests that run at a time. max_num_batched_tokens: tokens of one step, at least
    max_num_seqs, so that every running request can have one.
    long_prefill_token_threshold: tokens of one prompt that a step takes while other requests live; 0: no
      limit.
    watermark: part of the pool that an admission must leave free while others run, in [0, 1).
    async_scheduling: a step is scheduled before the results of the one before it are in.
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        check_int("max_num_seqs", self.max_num_seqs, 1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_int("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        if not 0.0 <= self.watermark < 1.0:
            raise JaxkvError(f"watermark must be in [0, 1), got {self.watermark}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise JaxkvError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is smaller than max_num_seqs "
                f"{self.max_num_seqs}: some running request would get no token"
            )

    @property
    def batches_in_flight(self) -> int:
        return 2 if self.async_scheduling else 1

    def check_fits(self, plan: CachePlan) -> None:
        """Raises JaxkvError where steps could hold more tokens in flight than the plan reserves blocks
        for.
        """
        in_flight = self.max_num_batched_tokens * self.batches_in_flight
        if in_flight > plan.max_in_flight_tokens:
            raise JaxkvError(
                f"{self.batches_in_flight} batches of {self.max_num_batched_tokens} tokens put {in_flight} "
                f"tokens in flight, but the plan is made for {plan.max_in_flight_tokens}"
            )
