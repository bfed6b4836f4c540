"""What an engine counts while it runs."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class EngineMetrics:
    """Counters since the start (or the last `reset`); times in seconds.

    usable_blocks, peak_blocks_used: of the pool. num_steps, num_scheduled_tokens: prompt and generated tokens
    that went through the model. num_generated_tokens: sampled and kept. host_time: spent before steps were
    started (scheduling, allocating, filling arrays). busy_time: spent in steps, waiting for the device
    included.
    """

    usable_blocks: int
    peak_blocks_used: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_generated_tokens: int = 0
    host_time: float = 0.0
    busy_time: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second of the time the engine worked, prefill included."""
        return self.num_generated_tokens / self.busy_time if self.busy_time else 0.0

    def reset(self) -> None:
        """Sets every counter to 0."""
        self.__init__(usable_blocks=self.usable_blocks)
