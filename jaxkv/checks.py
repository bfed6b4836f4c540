"""Checks of what callers pass in: each raises a JaxkvError that names the value and what it should be."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxkv.errors import JaxkvError


def check_int(name: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    """Raises JaxkvError unless `value` is an int (not a bool) of at least `minimum` and at most `maximum`.

    Integers of numpy are refused as well: they overflow, and JSON has none.
    """
    if isinstance(value, np.integer):
        raise JaxkvError(f"{name} must be a Python integer, not {value!r}: give int({name})")
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise JaxkvError(f"{name} must be an integer of at least {minimum}, not {value!r}")
    if maximum is not None and value > maximum:
        raise JaxkvError(f"{name} must be at most {maximum}, not {value}")


def check_bool(name: str, value: Any) -> None:
    """Raises JaxkvError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise JaxkvError(f"{name} must be True or False, not {value!r}")


def check_fraction(name: str, value: Any) -> None:
    """Raises JaxkvError unless `value` is a number (not a bool) in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise JaxkvError(f"{name} must be a number in [0, 1), not {value!r}")


def check_is(name: str, value: Any, kind: type) -> None:
    """Raises JaxkvError unless `value` is of the class `kind`."""
    if not isinstance(value, kind):
        raise JaxkvError(f"{name} must be a {kind.__name__}, not {value!r}")


def check_all(name: str, values: Any, kind: type) -> None:
    """Raises JaxkvError unless `values` is a list or tuple whose items are all of the class `kind`."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise JaxkvError(f"{name} must be a list or tuple, not {values!r}")
    for value in values:
        check_is(f"every item of {name}", value, kind)


def int_array(name: str, values: Any) -> NDArray[np.int64]:
    """int64[n] of a one-dimensional array or list of integers; JaxkvError for anything else."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # lists of different lengths
        raise JaxkvError(f"{name} must be a list of integers: {error}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise JaxkvError(f"{name} must be a list of integers, not shape {array.shape} of {array.dtype}")
    return array.astype(np.int64, copy=False)
