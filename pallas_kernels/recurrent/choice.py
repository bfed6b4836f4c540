"""Picking one of an operation's implementations."""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace

logger = logging.getLogger(__name__)

_FIRST_CHOICE = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}
_FALLBACK = "xla"
_already_said: set[str] = set()


def refuses_nothing(place: StatePlace, key_heads: int) -> None:
    """Any state is served."""
    del place, key_heads


class Implementation(NamedTuple):
    """One way to compute an operation.

    refuses: says why a state's part, with so many key heads (0 where there are none), is not served, or None.
    """

    run: Callable[..., StepResult]
    refuses: Callable[[StatePlace, int], str | None] = refuses_nothing


def choose(
    known: Mapping[str, Implementation], place: StatePlace, name: str | None, key_heads: int = 0
) -> Callable[..., StepResult]:
    """The implementation called `name`, or the platform's first choice if it serves the state.

    One that does not serve it falls back to "xla" and is logged once. An operation without a kernel for the
    platform is computed by "xla". Raises ValueError for an unknown name, and for a state that the
    implementation asked for by name does not serve.
    """
    if name is not None:
        if name not in known:
            raise ValueError(f"unknown implementation {name!r}, known: {', '.join(known)}")
        reason = known[name].refuses(place, key_heads)
        if reason is not None:
            raise ValueError(f"implementation {name!r} does not serve {place.layout}: {reason}")
        return known[name].run
    first = _FIRST_CHOICE.get(jax.default_backend(), _FALLBACK)
    if first not in known:
        return known[_FALLBACK].run
    reason = known[first].refuses(place, key_heads)
    if reason is None:
        return known[first].run
    message = f"{first} does not serve {place.layout} ({reason}): using {_FALLBACK}"
    if message not in _already_said:
        _already_said.add(message)
        logger.warning(message)
    return known[_FALLBACK].run
