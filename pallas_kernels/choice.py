"""Picking an operation's implementation, from what each refuses: one place for all operations."""

import logging
from collections.abc import Callable, Mapping

import jax

from pallas_kernels.cpu import available

logger = logging.getLogger(__name__)

Queries = jax.Array | jax.ShapeDtypeStruct
"""Queries `[T, Hq, D]`, or their shape and dtype."""

_FIRST_CHOICE = {"tpu": "pallas_tpu", "gpu": "pallas_gpu", "cpu": "numba"}
_FALLBACK = "xla"
_already_said: set[str] = set()


def choose_name(
    refusals: Mapping[str, Callable[[], str | None]], served: object, name: str | None = None
) -> str:
    """`name`, or the platform's first choice if it serves what is asked for.

    refusals: by implementation, why it does not serve it, or None. served: what is asked for, for messages.
    A first choice that refuses falls back to "xla" and is logged once; one that does not exist falls back
    silently, and kernels of numba's where it is not installed with a line that only tells (level INFO).
    Raises ValueError for an unknown name, and where the implementation asked for by name refuses.
    """
    if name is not None:
        if name not in refusals:
            raise ValueError(f"unknown implementation {name!r}, known: {', '.join(refusals)}")
        reason = refusals[name]()
        if reason is not None:
            raise ValueError(f"implementation {name!r} does not serve {served}: {reason}")
        return name
    first = _FIRST_CHOICE.get(jax.default_backend(), _FALLBACK)
    if first not in refusals:
        return _FALLBACK
    missing = available.why_not() if first == "numba" else None
    if missing is not None:
        _say_once(logging.INFO, f"{first} is not used ({missing}): using {_FALLBACK}")
        return _FALLBACK
    reason = refusals[first]()
    if reason is None:
        return first
    _say_once(logging.WARNING, f"{first} does not serve {served} ({reason}): using {_FALLBACK}")
    return _FALLBACK


def _say_once(level: int, message: str) -> None:
    if message not in _already_said:
        _already_said.add(message)
        logger.log(level, message)
