"""Lines of a trace file: read one by one, refused with their number."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxkv.errors import JaxkvError


class BadLine(Exception):
    """What is wrong with a line; the reader adds where it is."""


@dataclass
class LineReader:
    """Reads a text file line by line.

    skip_bad_lines: bad lines are counted in `num_skipped` instead of refused.
    """

    path: str
    skip_bad_lines: bool = False
    num_skipped: int = field(default=0, init=False)

    def lines(self) -> Iterator[tuple[int, str]]:
        """Line numbers from 1 and texts; empty lines are passed over. Raises JaxkvError for an unreadable
        file, and for bytes that are not UTF-8.
        """
        try:
            with Path(self.path).open("rb") as file:
                for number, raw in enumerate(file, 1):
                    try:
                        text = raw.decode("utf-8")
                    except UnicodeDecodeError as error:
                        self.bad(number, f"not UTF-8 text: byte {raw[error.start]:#04x} at {error.start}")
                        continue
                    if text.strip():
                        yield number, text
        except OSError as error:
            raise JaxkvError(f"cannot read the trace {self.path}: {error.strerror or error}") from None

    def bad(self, number: int, why: str) -> None:
        """Refuses a line, or counts it."""
        if not self.skip_bad_lines:
            raise JaxkvError(
                f"{self.path}, line {number}: {why} (--skip-bad-lines counts bad lines and goes on)"
            )
        self.num_skipped += 1

    def parse[T](self, lines: Iterable[tuple[int, str]], parse: Callable[[str, int], T]) -> Iterator[T]:
        """`parse(text, number)` of each line; its BadLine becomes the line's refusal."""
        for number, text in lines:
            try:
                parsed = parse(text, number)
            except BadLine as error:
                self.bad(number, str(error))
                continue
            yield parsed


def json_object(text: str) -> dict[str, Any]:
    """The JSON object that a line is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not JSON, or cut short: {error}") from None
    if not isinstance(value, dict):
        raise BadLine(f"a JSON object is needed, not {_shown(value)}")
    return value


def whole_number(values: dict[str, Any], key: str, at_least: int = 0) -> int:
    """An integer of the object."""
    return checked_whole(_value(values, key), key, at_least)


def checked_whole(value: object, name: str, at_least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value < 2**31:
        raise BadLine(f"{name} must be a whole number of at least {at_least}, got {_shown(value)}")
    return value


def number(values: dict[str, Any], key: str) -> float:
    """A finite number, at least 0."""
    return checked_number(_value(values, key), key)


def checked_number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise BadLine(f"{name} must be a number of at least 0, got {_shown(value)}")
    return float(value)


def text_value(values: dict[str, Any], key: str) -> str:
    value = _value(values, key)
    if not isinstance(value, str):
        raise BadLine(f"{key} must be a text, got {_shown(value)}")
    return value


def list_value(values: dict[str, Any], key: str) -> list[Any]:
    value = _value(values, key)
    if not isinstance(value, list):
        raise BadLine(f"{key} must be a list, got {_shown(value)}")
    return value


def _value(values: dict[str, Any], key: str) -> Any:
    if key not in values:
        raise BadLine(f"{key!r} is missing; the line has {', '.join(map(repr, values)) or 'nothing'}")
    return values[key]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
