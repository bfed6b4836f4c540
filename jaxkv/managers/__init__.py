"""One manager for each distinct spec of a plan; each owns the blocks of its groups for all requests."""

from jaxkv.managers.base import (
    NEVER,
    NO_PART,
    Filled,
    Finder,
    HitPart,
    Manager,
    ManagerContext,
    Row,
    Span,
    StepClock,
)
from jaxkv.managers.computed_units import ComputedUnits
from jaxkv.managers.make import make_managers
from jaxkv.managers.mamba import MambaManager, StateUnits
from jaxkv.managers.positional import PositionalManager

__all__ = [
    "NEVER",
    "NO_PART",
    "ComputedUnits",
    "Filled",
    "Finder",
    "HitPart",
    "MambaManager",
    "Manager",
    "ManagerContext",
    "PositionalManager",
    "Row",
    "Span",
    "StateUnits",
    "StepClock",
    "make_managers",
]
