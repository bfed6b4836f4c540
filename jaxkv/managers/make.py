"""From the groups of a plan to managers."""

from collections.abc import Sequence

from jaxkv.errors import JaxkvError
from jaxkv.managers.base import Manager, ManagerContext
from jaxkv.managers.chunked_local import ChunkedLocalManager
from jaxkv.managers.full import FullAttentionManager
from jaxkv.managers.mamba import MambaManager
from jaxkv.managers.positional import PositionalManager
from jaxkv.managers.private import CrossAttentionManager, PrivateManager, ScratchManager
from jaxkv.managers.sliding_window import SlidingWindowManager
from jaxkv.planning.plan import CacheGroup
from jaxkv.specs import AttentionSpec

POSITIONAL: dict[str, type[PositionalManager]] = {
    "full": FullAttentionManager,
    "mla": FullAttentionManager,
    "sliding_window": SlidingWindowManager,
    "sliding_window_mla": SlidingWindowManager,
    "chunked_local": ChunkedLocalManager,
}
PRIVATE: dict[str, type[PrivateManager]] = {"cross": CrossAttentionManager, "scratch": ScratchManager}


def siblings(groups: Sequence[CacheGroup]) -> list[list[int]]:
    """Groups that always move together: equal specs, equal states, EAGLE or not. In the order of the plan."""
    found: list[list[int]] = []
    for index, group in enumerate(groups):
        for members in found:
            first = groups[members[0]]
            if (group.spec, group.blocks_per_state, group.is_eagle_group, type(group.spec)) == (
                first.spec,
                first.blocks_per_state,
                first.is_eagle_group,
                type(first.spec),
            ):
                members.append(index)
                break
        else:
            found.append([index])
    return found


def make_managers(
    groups: Sequence[CacheGroup],
    context: ManagerContext,
    *,
    drop_eagle_block: bool,
    context_parallel_size: int,
) -> list[Manager]:
    """One manager for each set of siblings, in the order of their first groups."""
    managers: list[Manager] = []
    for group_ids in siblings(groups):
        group = groups[group_ids[0]]
        kind, states = group.spec.kind, group.blocks_per_state
        eagle = group.is_eagle_group and drop_eagle_block
        if kind in POSITIONAL and isinstance(group.spec, AttentionSpec):
            manager: Manager = POSITIONAL[kind](
                context, group.spec, group_ids, states, eagle, context_parallel_size
            )
        elif kind in PRIVATE:
            manager = PRIVATE[kind](context, group.spec, group_ids, states, eagle)
        elif kind == "mamba":
            manager = MambaManager(context, group.spec, group_ids, states, eagle)  # pyright: ignore
        else:
            raise JaxkvError(f"no manager serves the kind {kind!r} of group {group_ids[0]}")
        managers.append(manager)
    return managers
