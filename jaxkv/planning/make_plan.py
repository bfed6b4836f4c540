"""From layers and memory to a plan."""

import math
from collections.abc import Callable, Mapping, Sequence

from jaxkv.checks import check_is
from jaxkv.errors import JaxkvError
from jaxkv.planning.capacity import BlockSizes, blocks_in, fitting_limits, resolve_block_sizes
from jaxkv.planning.group_checks import check_groups
from jaxkv.planning.grouping import Grouping
from jaxkv.planning.hybrid_blocks import align_hybrid_blocks
from jaxkv.planning.pages import aligned_group
from jaxkv.planning.plan import CacheGroup, CachePlan, PlanConfig, slots_of
from jaxkv.planning.split import split_groups
from jaxkv.planning.unified import unified_groups
from jaxkv.specs import KVCacheSpec, RequestLimits, cdiv

POLICIES: dict[str, Callable[[Mapping[str, KVCacheSpec], PlanConfig], Grouping]] = {
    "unified": unified_groups,
    "split": split_groups,
}
"""How layers become groups, by name of the policy."""


def make_plan(
    layers: Mapping[str, KVCacheSpec], config: PlanConfig, available_memory_bytes: int
) -> CachePlan:
    """Plans the cache of a model whose layers (by name, in the model's order) keep what `layers` says.

    Raises JaxkvError where the layers fit no policy, no cache could serve the groups, or the memory holds no
    block or not one request.
    """
    return make_stage_plans([layers], config, [available_memory_bytes])[0]


def make_stage_plans(
    stages: Sequence[Mapping[str, KVCacheSpec]], config: PlanConfig, available_memory_bytes: Sequence[int]
) -> tuple[CachePlan, ...]:
    """One plan for each pipeline stage (or rank), with the same groups and the same number of blocks.

    stages: each stage's own layers. A layer that several hold must keep the same on all of them.
    available_memory_bytes: one figure a stage.

    Groups are formed over the whole model and then cut down to each stage's layers, so that one block table
    serves all; the number of blocks is the smallest that any stage's memory gives, and so is an auto-fitted
    maximum length.
    """
    if len(stages) != len(available_memory_bytes) or not stages:
        raise JaxkvError(f"{len(stages)} stages need as many memory sizes, got {len(available_memory_bytes)}")
    grouping = _group(_all_layers(stages), config)
    check_groups(grouping.groups, config.decode_context_parallel_size)
    per_stage = [_on_stage(grouping.groups, stage) for stage in stages]
    pools = [_pool_shape(groups, config) for groups in per_stage]
    num_blocks = min(
        (
            blocks_in(memory, page * slots, config)
            for (page, slots), memory in zip(pools, available_memory_bytes, strict=True)
            if slots
        ),
        default=1,
    )
    widest = max(page * slots for page, slots in pools)
    limits = fitting_limits(grouping.groups, num_blocks, widest, config) if widest else config.limits
    notes = grouping.notes
    if limits.max_model_len < config.max_model_len:
        notes += (f"max_model_len was lowered from {config.max_model_len} to {limits.max_model_len} to fit",)
    block_sizes = resolve_block_sizes(grouping.groups, config)
    return tuple(
        _plan(groups, pool, num_blocks, limits, block_sizes, config, notes)
        for groups, pool in zip(per_stage, pools, strict=True)
    )


def plan_from_groups(groups: Sequence[CacheGroup], num_blocks: int, config: PlanConfig) -> CachePlan:
    """A plan around groups that are given: for replays and tests. Whether a request fits is not checked.

    Pages may differ between groups: the plan's page is then their greatest common divisor.
    """
    groups = tuple(aligned_group(group, config.page_alignment_bytes) for group in groups)
    pool, block_sizes = _pool_shape(groups, config), resolve_block_sizes(groups, config)
    return _plan(groups, pool, num_blocks, config.limits, block_sizes, config)


def _plan(
    groups: tuple[CacheGroup, ...],
    pool: tuple[int, int],
    num_blocks: int,
    limits: RequestLimits,
    block_sizes: BlockSizes,
    config: PlanConfig,
    notes: tuple[str, ...] = (),
) -> CachePlan:
    """pool: bytes of a page, and layer slots of a block."""
    return CachePlan(
        policy=config.policy,
        groups=groups,
        page_size_bytes=pool[0],
        layer_slots=pool[1],
        num_blocks=num_blocks,
        limits=limits,
        hash_block_size=block_sizes.hash_block_size,
        scheduler_block_size=block_sizes.scheduler_block_size,
        hits_below_blocks=config.prefix_match_unit is not None,
        max_num_seqs=config.max_num_seqs,
        notes=notes,
    )


def _group(layers: Mapping[str, KVCacheSpec], config: PlanConfig) -> Grouping:
    """The policy's groups, pages raised to the alignment, groups with draft layers marked."""
    if config.policy not in POLICIES:
        raise JaxkvError(f"unknown policy {config.policy!r}; known are {', '.join(POLICIES)}")
    notes: tuple[str, ...] = ()
    if config.align_hybrid_blocks and config.policy == "unified":
        layers, notes = align_hybrid_blocks(layers)
    grouping = POLICIES[config.policy](layers, config)
    groups = tuple(_finished(group, layers, config) for group in grouping.groups)
    return Grouping(groups, notes + grouping.notes)


def _finished(group: CacheGroup, layers: Mapping[str, KVCacheSpec], config: PlanConfig) -> CacheGroup:
    is_eagle = config.use_eagle and any(layers[name].is_draft for name in group.layer_names)
    group = CacheGroup(
        layer_names=group.layer_names,
        spec=group.spec,
        blocks_per_state=group.blocks_per_state,
        is_eagle_group=is_eagle,
        layer_specs=group.layer_specs,
    )
    return aligned_group(group, config.page_alignment_bytes)


def _all_layers(stages: Sequence[Mapping[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    layers: dict[str, KVCacheSpec] = {}
    for stage in stages:
        check_is("layers", stage, Mapping)
        for name, spec in stage.items():
            check_is("every layer's name", name, str)
            check_is(f"what layer {name} keeps", spec, KVCacheSpec)
            if layers.setdefault(name, spec) != spec:
                raise JaxkvError(f"layer {name} keeps {layers[name]} on one stage and {spec} on another")
    return layers


def _on_stage(groups: Sequence[CacheGroup], stage: Mapping[str, KVCacheSpec]) -> tuple[CacheGroup, ...]:
    """The groups with only the stage's own layers; a group may be left without any."""
    result = []
    for group in groups:
        kept = [i for i, name in enumerate(group.layer_names) if name in stage]
        result.append(
            CacheGroup(
                layer_names=tuple(group.layer_names[i] for i in kept),
                spec=group.spec,
                blocks_per_state=group.blocks_per_state,
                is_eagle_group=group.is_eagle_group,
                layer_specs=tuple(group.layer_specs[i] for i in kept) if group.layer_specs else (),
            )
        )
    return tuple(result)


def _pool_shape(groups: Sequence[CacheGroup], config: PlanConfig) -> tuple[int, int]:
    """(bytes of a page, layer slots): the largest page that all layers' pages are whole numbers of."""
    pages = {group.spec_of(i).page_size_bytes for group in groups for i in range(len(group.layer_names))}
    page = math.gcd(*pages)
    slots = max(
        (
            cdiv(sum(slots_of(group, i, page) for i in range(len(group.layer_names))), group.blocks_per_state)
            for group in groups
        ),
        default=0,
    )
    return page, slots
