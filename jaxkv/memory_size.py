"""Sizes of memory as people write them."""

import re
from decimal import Decimal

from jaxkv.errors import JaxkvError

_UNITS = {
    "": 1,
    "b": 1,
    "k": 2**10,
    "kib": 2**10,
    "kb": 10**3,
    "m": 2**20,
    "mib": 2**20,
    "mb": 10**6,
    "g": 2**30,
    "gib": 2**30,
    "gb": 10**9,
    "t": 2**40,
    "tib": 2**40,
    "tb": 10**12,
}


def parse_memory_size(text: str | int) -> int:
    """Bytes of a size such as "4GiB", "512MiB", "1.5g" or 1048576.

    GiB, MiB, KiB and the bare letters are powers of 1024; GB, MB, kB powers of 1000. Raises JaxkvError for
    anything else and for sizes below one byte.
    """
    size = _parsed(text)
    if size is None:
        raise JaxkvError(f"{text!r} is not a memory size; write bytes, or a unit as in 4GiB or 512MiB")
    if size < 1:
        raise JaxkvError(f"a memory size must be at least 1 byte, got {text!r}")
    return size


def _parsed(text: str | int) -> int | None:
    if isinstance(text, int):
        return None if isinstance(text, bool) else text
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*", text) if isinstance(text, str) else None
    )
    if match is None or match[2].lower() not in _UNITS:
        return None
    return int(Decimal(match[1]) * _UNITS[match[2].lower()])


def format_bytes(size: int | float) -> str:
    """The size in the largest unit of 1024 that gives at least 1: "3.50 GiB", "96.0 KiB", "17 B"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = _UNITS[unit.lower()]
        if abs(size) >= scale:
            value = size / scale
            return f"{value:.0f} {unit}" if value == round(value) else f"{value:.4g} {unit}"
    return f"{size:.0f} B"
