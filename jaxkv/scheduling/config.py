"""What a scheduler may do in one step."""

from dataclasses import dataclass

from jaxkv.checks import check_bool, check_fraction, check_int
from jaxkv.errors import JaxkvError
from jaxkv.planning.plan import CachePlan


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step, under vLLM's names.

    max_num_seqs: requests that run at a time. max_num_batched_tokens: tokens of one step, at least
    max_num_seqs, so that every running request can have one.
    long_prefill_token_threshold: tokens of one prompt that a step takes while other requests live; 0: no
      limit.
    watermark: part of the pool that an admission must leave free while others run, in [0, 1).
    async_scheduling: a step is scheduled before the results of the one before it are in.
    num_speculative_tokens: drafts that one step may verify for a request. They depend on the results of the
      step before, so steps cannot overlap then. A draft model that writes its own cache entries ahead needs
      the plan's num_lookahead_tokens as well.
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    async_scheduling: bool = False
    num_speculative_tokens: int = 0

    def __post_init__(self) -> None:
        check_int("max_num_seqs", self.max_num_seqs, 1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_int("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        check_int("num_speculative_tokens", self.num_speculative_tokens, 0)
        check_fraction("watermark", self.watermark)
        check_bool("async_scheduling", self.async_scheduling)
        if self.async_scheduling and self.num_speculative_tokens:
            raise JaxkvError(
                f"num_speculative_tokens {self.num_speculative_tokens} goes with async_scheduling off only: "
                "drafts depend on the results of the step before"
            )
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
