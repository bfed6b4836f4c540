"""Picking one of an operation's implementations."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from pallas_kernels.choice import choose_name
from pallas_kernels.recurrent.conv_delta import ConvDeltaPlace
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace

Place = StatePlace | ConvDeltaPlace


def refuses_nothing(place: Place, key_heads: int) -> None:
    """Any state is served."""
    del place, key_heads


class Implementation(NamedTuple):
    """One way to compute an operation.

    refuses: says why a place, with so many key heads (0 where there are none), is not served, or None.
    """

    run: Callable[..., StepResult]
    refuses: Callable[[Any, int], str | None] = refuses_nothing


def choose(
    known: Mapping[str, Implementation], place: Place, name: str | None, key_heads: int = 0
) -> Callable[..., StepResult]:
    """The implementation called `name`, or the platform's first choice if it serves the state.

    One that does not serve it falls back to "xla" and is logged once. An operation without a kernel for the
    platform is computed by "xla". Raises ValueError for an unknown name, and for a state that the
    implementation asked for by name does not serve.
    """
    refusals = {way: partial(known[way].refuses, place, key_heads) for way in known}
    return known[choose_name(refusals, place.layout, name)].run
