"""The cache manager that a scenario's config asks for."""

from jaxkv.cache_manager import KVCacheManager
from jaxkv.planning.plan import CachePlan
from jaxkv.scenario.config import ScenarioConfig


def make_manager(plan: CachePlan, config: ScenarioConfig) -> KVCacheManager:
    """Raises JaxkvError where the plan's groups cannot be served together as asked.

    An EAGLE group gives up the last block of a hit: a scenario's hashes do not look ahead.
    """
    return KVCacheManager(
        plan,
        enable_caching=config.enable_prefix_caching,
        hash_algo=config.prefix_caching_hash_algo,
        retention_interval=config.prefix_cache_retention_interval,
        prefix_match_unit=config.prefix_match_unit,
        enable_kv_cache_events=config.enable_kv_cache_events,
        max_num_seqs=min(config.max_num_seqs, 64),
    )
