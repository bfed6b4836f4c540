"""Reading a model's configuration, which anyone may have written, field by field with clear refusals."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

_REQUIRED = object()


class ConfigFields:
    """Checked access to the fields of a config.json object or of GGUF metadata.

    Every method raises ValueError that names the field, its value and what is allowed.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "", where: str = "the configuration"):
        """`prefix` is put before every name, e.g. "gemma3."; `where` says in messages what is being read."""
        self._values, self._prefix, self._where = values, prefix, where

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value; null counts as absent."""
        value = self._values.get(self._prefix + name)
        return default if value is None else value

    def integer(self, name: str, default: Any = _REQUIRED, minimum: int = 1) -> int:
        """An integer of at least `minimum`."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.refusal(name, f"an integer of at least {minimum}")
        return value

    def positive(self, name: str, default: Any = _REQUIRED) -> float:
        """A finite number above zero."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.refusal(name, "a positive number")
        return float(value)

    def positive_or_none(self, name: str) -> float | None:
        """A finite number above zero, or None where the field is absent."""
        return None if self.get(name) is None else self.positive(name)

    def fraction(self, name: str, default: Any = _REQUIRED) -> float:
        """A number above zero, at most one."""
        value = self.positive(name, default)
        if value > 1:
            raise self.refusal(name, "a number above 0, at most 1")
        return value

    def words(self, name: str, count: int, known: Sequence[str]) -> tuple[str, ...] | None:
        """A list of `count` of the `known` words, or None where the field is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or any(word not in known for word in value):
            raise self.refusal(name, f"a list of {count} of {tuple(known)}")
        return tuple(value)

    def section(self, name: str) -> "ConfigFields":
        """The fields of a nested object; none where it is absent."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self.refusal(name, "an object")
        return ConfigFields(value, where=f"{name} of {self._where}")

    def require(self, name: str, allowed: Sequence[Any], default: Any) -> None:
        """Refuses a value that is not among `allowed`; an absent one counts as `default`."""
        if self.get(name, default) not in allowed:
            raise self.refusal(name, " or ".join(repr(value) for value in allowed))

    def refusal(self, name: str, wanted: str) -> ValueError:
        """The error for a field whose value is not what is wanted."""
        return ValueError(f"{self._prefix}{name} in {self._where} must be {wanted}, not {self.get(name)!r}")

    def _present(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is _REQUIRED:
            raise ValueError(f"{self._where} lacks {self._prefix}{name}")
        return value


def check_head_turns(head_size: int) -> None:
    """ValueError unless rotary embeddings can turn a whole head: they turn pairs of elements."""
    if head_size % 2:
        raise ValueError(f"head size {head_size} is odd; rotary embeddings need an even one")
