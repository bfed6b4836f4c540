"""Answers of a look-up: how much of a prompt is cached, where, and why it is not more."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxkv.managers import HitPart, Manager


@dataclass(kw_only=True, eq=False)
class PrefixHit:
    """The longest prefix that every group can serve. Good until the cache gives out a block it uses.

    num_tokens: tokens that need not be computed.
    tokens_by_group: what each group could serve by itself; 0 for groups that take no part, and for those that
    need nothing from the cache at their longest (a local chunk that ends there).
    limited_by: the group that made the hit shorter than the longest any group could serve, or None.
    lost_tokens: by how much.
    branch_point: where a longer prefix that some group holds ends, so that states and windows are worth
    keeping there; 0: nowhere beyond the hit.
    pending: a longer hit was passed over because its content is computed in the step being scheduled; it can
    be had in the next one.
    prefix_hash: of these tokens, None where there are none. version: the pool's, when the hit was found.
    parts: by manager, the units of the hit.
    """

    num_tokens: int
    tokens_by_group: tuple[int, ...]
    limited_by: int | None
    lost_tokens: int
    branch_point: int
    pending: bool
    parts: tuple["HitPart", ...]
    version: int
    prefix_hash: bytes | None
    managers: tuple["Manager", ...]

    @cached_property
    def blocks(self) -> list[list[int]]:
        """By group: the ids of the hit by block position, 0 where a group needs nothing. To look at."""
        tables: list[list[int]] = [[] for _ in self.tokens_by_group]
        for manager, part in zip(self.managers, self.parts, strict=True):
            ids = manager.pool.members(manager.number, part.leaders)[:: manager.blocks_per_state].tolist()
            for group, held in zip(manager.group_ids, ids, strict=True):
                if self.num_tokens:
                    tables[group] = [0] * part.first_block + held
        return tables
