"""Reads JSON objects strictly: every key has a type, and a key that nobody asked for is refused by name."""

import math
from collections.abc import Mapping
from typing import Any

from jaxkv.errors import JaxkvError

REQUIRED: Any = object()


class Fields:
    """One JSON object being read. `where` names it in messages; `finish` refuses the keys left unread."""

    def __init__(self, raw: Any, where: str) -> None:
        if not isinstance(raw, Mapping):
            raise JaxkvError(f"{where} must be an object, not {_name(raw)}")
        self.where = where
        self._raw = raw
        self._read: list[str] = []

    def has(self, key: str) -> bool:
        return key in self._raw

    def value(self, key: str, default: Any = REQUIRED) -> Any:
        """The value as it stands, or the default; without a default the key must be there."""
        self._read.append(key)
        if key in self._raw:
            return self._raw[key]
        if default is REQUIRED:
            raise JaxkvError(f"{self.where} lacks the key {key!r}")
        return default

    def integer(self, key: str, default: Any = REQUIRED, *, minimum: int = 0) -> int:
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise JaxkvError(f"{self.where}: {key!r} must be an integer, not {_name(value)}")
        if value < minimum:
            raise JaxkvError(f"{self.where}: {key!r} is {value}; it must be at least {minimum}")
        return value

    def optional_integer(self, key: str, default: int | None = None, *, minimum: int = 0) -> int | None:
        if self._raw.get(key, default) is None:
            return self.value(key, None)
        return self.integer(key, default, minimum=minimum)

    def number(self, key: str, default: Any = REQUIRED, *, minimum: float = 0.0) -> float:
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise JaxkvError(f"{self.where}: {key!r} must be a number, not {_name(value)}")
        if value < minimum:
            raise JaxkvError(f"{self.where}: {key!r} is {value}; it must be at least {minimum}")
        return float(value)

    def boolean(self, key: str, default: Any = REQUIRED) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise JaxkvError(f"{self.where}: {key!r} must be true or false, not {_name(value)}")
        return value

    def text(self, key: str, default: Any = REQUIRED) -> str:
        value = self.value(key, default)
        if not isinstance(value, str):
            raise JaxkvError(f"{self.where}: {key!r} must be a string, not {_name(value)}")
        return value

    def optional_text(self, key: str) -> str | None:
        return None if self._raw.get(key) is None and self.value(key, None) is None else self.text(key)

    def choice(self, key: str, choices: tuple[str, ...], default: Any = REQUIRED) -> str:
        value = self.text(key, default)
        if value not in choices:
            raise JaxkvError(f"{self.where}: {key!r} is {value!r}; it must be one of {', '.join(choices)}")
        return value

    def items(self, key: str, default: Any = REQUIRED) -> list[Any]:
        value = self.value(key, default)
        if not isinstance(value, list):
            raise JaxkvError(f"{self.where}: {key!r} must be a list, not {_name(value)}")
        return value

    def expect(self) -> Mapping[str, Any] | None:
        """The optional `expect` object: what the answer must hold here."""
        value = self.value("expect", None)
        if value is not None and not isinstance(value, Mapping):
            raise JaxkvError(f"{self.where}: 'expect' must be an object, not {_name(value)}")
        return value

    def finish(self) -> None:
        """Refuses, by name, every key that was not read."""
        unknown = [key for key in self._raw if key not in self._read]
        if unknown:
            known = ", ".join(sorted(set(self._read)))
            names = ", ".join(repr(key) for key in unknown)
            raise JaxkvError(f"{self.where}: unknown key {names}; the keys here are {known}")


def _name(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
