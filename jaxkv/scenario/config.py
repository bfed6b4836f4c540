"""The `config` object of a scenario, with its defaults."""

from dataclasses import dataclass
from typing import Any

from jaxkv.errors import JaxkvError
from jaxkv.scenario.fields import Fields

POLICIES = ("unified", "split")


@dataclass(frozen=True, kw_only=True)
class ScenarioConfig:
    """What an engine would be started with. The names and defaults are those of a scenario file.

    prefix_cache_retention_interval: 0 keeps only what the replay boundary and shared-prefix junctions need, n
      also a boundary every n tokens, None every block.
    """

    policy: str = "unified"
    max_model_len: int = 8192
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"
    prefix_cache_retention_interval: int | None = 0
    prefix_match_unit: int | None = None
    mamba_cache_mode: str | None = None
    disable_hybrid_kv_cache_manager: bool = False
    num_gpu_blocks_override: int | None = None
    decode_context_parallel_size: int = 1
    tensor_parallel_size: int = 1
    watermark: float = 0.0
    long_prefill_token_threshold: int = 0
    async_scheduling: bool = False
    use_eagle: bool = False
    num_speculative_tokens: int = 0
    auto_fit_max_model_len: bool = False
    enable_kv_cache_events: bool = False

    @property
    def batches_in_flight(self) -> int:
        return 2 if self.async_scheduling else 1

    @property
    def max_in_flight_tokens(self) -> int:
        """Tokens that may be scheduled and not yet done: they hold blocks that no window has let go."""
        return self.batches_in_flight * self.max_num_batched_tokens

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots a draft model writes ahead of the accepted tokens."""
        return self.num_speculative_tokens if self.use_eagle else 0

    @property
    def resolved_mamba_cache_mode(self) -> str:
        return self.mamba_cache_mode or ("align" if self.enable_prefix_caching else "none")


def parse_config(raw: Any, where: str = "config") -> ScenarioConfig:
    """Reads and checks the object; raises JaxkvError that names an unknown key or a value out of range."""
    fields = Fields(raw, where)
    defaults = ScenarioConfig()
    mode = fields.optional_text("mamba_cache_mode")
    if mode not in (None, "none", "align"):
        raise JaxkvError(f"{where}: 'mamba_cache_mode' is {mode!r}; it must be none or align (or null)")
    config = ScenarioConfig(
        policy=fields.choice("policy", POLICIES, defaults.policy),
        max_model_len=fields.integer("max_model_len", defaults.max_model_len, minimum=1),
        block_size=fields.integer("block_size", defaults.block_size, minimum=1),
        max_num_batched_tokens=fields.integer(
            "max_num_batched_tokens", defaults.max_num_batched_tokens, minimum=1
        ),
        max_num_seqs=fields.integer("max_num_seqs", defaults.max_num_seqs, minimum=1),
        enable_prefix_caching=fields.boolean("enable_prefix_caching", defaults.enable_prefix_caching),
        prefix_caching_hash_algo=fields.text("prefix_caching_hash_algo", defaults.prefix_caching_hash_algo),
        prefix_cache_retention_interval=fields.optional_integer("prefix_cache_retention_interval", 0),
        prefix_match_unit=fields.optional_integer("prefix_match_unit", minimum=1),
        mamba_cache_mode=mode,
        disable_hybrid_kv_cache_manager=fields.boolean("disable_hybrid_kv_cache_manager", False),
        num_gpu_blocks_override=fields.optional_integer("num_gpu_blocks_override", minimum=1),
        decode_context_parallel_size=fields.integer("decode_context_parallel_size", 1, minimum=1),
        tensor_parallel_size=fields.integer("tensor_parallel_size", 1, minimum=1),
        watermark=fields.number("watermark", 0.0),
        long_prefill_token_threshold=fields.integer("long_prefill_token_threshold", 0),
        async_scheduling=fields.boolean("async_scheduling", False),
        use_eagle=fields.boolean("use_eagle", False),
        num_speculative_tokens=fields.integer("num_speculative_tokens", 0),
        auto_fit_max_model_len=fields.boolean("auto_fit_max_model_len", False),
        enable_kv_cache_events=fields.boolean("enable_kv_cache_events", False),
    )
    fields.finish()
    return config
