"""What must hold before a cache can be right.
Checked when it is built, with values, so that nothing fails later.
"""

from collections.abc import Sequence

from jaxkv.errors import JaxkvError
from jaxkv.planning.alignment import effective_block_size
from jaxkv.planning.group_checks import check_groups
from jaxkv.planning.plan import CacheGroup, CachePlan
from jaxkv.specs import AttentionSpec, CrossAttentionSpec, MambaSpec, ScratchSpec


def check_plan(
    plan: CachePlan, *, enable_caching: bool, prefix_match_unit: int | None, drop_eagle_block: bool
) -> None:
    """Raises JaxkvError where the plan's groups cannot be served together as asked."""
    if not plan.groups:
        raise JaxkvError("the plan has no cache groups: there is nothing to manage")
    check_groups(plan.groups, plan.limits.decode_context_parallel_size)
    if enable_caching:
        _check_content(plan.groups)
        _check_hashing(plan, prefix_match_unit)
        _check_lookahead(plan, drop_eagle_block)


def _check_content(groups: Sequence[CacheGroup]) -> None:
    """A hit goes on from what every layer has kept. Only rings and the encoder's output are no part of a
    prefix.
    """
    for index, group in enumerate(groups):
        spec = group.spec
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none":
            raise JaxkvError(
                f"group {index} keeps recurrent states in mamba_cache_mode 'none', so no hit could go on "
                "from one: mode 'align' keeps them, enable_caching=False does without hits"
            )
        if not spec.prefix_cacheable and not isinstance(spec, CrossAttentionSpec | ScratchSpec):
            raise JaxkvError(
                f"group {index} of kind {spec.kind!r} has prefix_cacheable False, so a hit would lack what "
                "it reads: with it enable_caching must be False"
            )


def _check_hashing(plan: CachePlan, prefix_match_unit: int | None) -> None:
    unit = plan.hash_block_size
    if prefix_match_unit is not None and prefix_match_unit != unit:
        raise JaxkvError(
            f"prefix_match_unit {prefix_match_unit} is not the plan's hash block of {unit} tokens"
        )
    for index, group in enumerate(plan.groups):
        size = effective_block_size(group.spec, plan.limits.decode_context_parallel_size)
        if group.spec.prefix_cacheable and isinstance(group.spec, AttentionSpec) and size % unit:
            raise JaxkvError(
                f"group {index} has blocks of {size} tokens, which is not a multiple of the hash block of "
                f"{unit}"
            )
        if isinstance(group.spec, MambaSpec) and size % unit:
            raise JaxkvError(
                f"group {index} keeps states every {size} tokens, which is not a multiple of the hash block "
                f"of {unit}"
            )


def _check_lookahead(plan: CachePlan, drop_eagle_block: bool) -> None:
    """Draft modules write cache entries that depend on later tokens; dropping one block must cover them."""
    lookahead = plan.limits.num_lookahead_tokens
    for index, group in enumerate(plan.groups):
        size = effective_block_size(group.spec, plan.limits.decode_context_parallel_size)
        if drop_eagle_block and group.is_eagle_group and lookahead > size:
            raise JaxkvError(
                f"EAGLE group {index} drops one block of {size} tokens from a hit, which does not cover the "
                f"{lookahead} tokens that its draft modules look ahead"
            )
