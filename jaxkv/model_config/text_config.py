"""Typed access to the part of a config.json that describes the text model."""

from collections.abc import Mapping
from typing import Any

from jaxkv.errors import JaxkvError

MAX_LAYERS = 10_000
"""More layers than any model has: a larger number is a mistake in the file."""


class TextConfig:
    """The keys of the text model: the `text_config` part of a multi-modal file, over the file's own keys.

    defaults: values of keys that the file may omit because they equal its class's defaults.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        nested = config.get("text_config")
        self._values = {**(defaults or {}), **config, **(nested if isinstance(nested, Mapping) else {})}

    def get(self, key: str) -> Any:
        """The key's value, None where it is missing."""
        return self._values.get(key)

    @property
    def model_type(self) -> str:
        """The name of the family; empty where the config has none, or no text."""
        value = self.get("model_type")
        return value if isinstance(value, str) else ""

    @property
    def num_layers(self) -> int:
        """`num_hidden_layers`. Raises JaxkvError for more than MAX_LAYERS."""
        count = self.integer("num_hidden_layers")
        if count > MAX_LAYERS:
            raise JaxkvError(f"the model's config has num_hidden_layers = {count}, more than {MAX_LAYERS}")
        return count

    def integer(self, *keys: str, at_least: int = 1) -> int:
        """The first of `keys` that has a value. Raises JaxkvError where none has, or it is no such number."""
        value = self.optional_integer(*keys, at_least=at_least)
        if value is None:
            raise JaxkvError(f"the model's config has none of the keys {', '.join(keys)}")
        return value

    def optional_integer(self, *keys: str, at_least: int = 1) -> int | None:
        """Like `integer`, but None where none of the keys has a value."""
        for key in keys:
            value = self._values.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
                raise JaxkvError(
                    f"the model's config has {key} = {value!r}; a whole number >= {at_least} is needed"
                )
            return value
        return None

    def part(self, key: str) -> "TextConfig":
        """The object under `key` as a config of its own. Raises JaxkvError where it is no object."""
        value = self._values.get(key)
        if not isinstance(value, Mapping):
            raise JaxkvError(f"the model's config has {key} = {value!r}; an object is needed")
        return TextConfig(value)

    def indices(self, key: str, first: int = 0) -> list[int]:
        """`key`: a list of layer numbers that begin at `first`, returned from 0 on.

        Raises JaxkvError for anything else, numbers outside the model and repeated ones.
        """
        return layer_indices(key, self._values.get(key), self.num_layers, first)


def layer_indices(key: str, value: Any, num_layers: int, first: int = 0) -> list[int]:
    """The layer numbers in `value`, counted from 0; JaxkvError where they are none of the model's."""
    if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
        raise JaxkvError(f"{key} must be a list of layer numbers, got {value!r}")
    outside = [i for i in value if not first <= i < num_layers + first]
    if outside:
        raise JaxkvError(
            f"{key} names layer {outside[0]}; the model's num_hidden_layers is {num_layers}, so layers are "
            f"{first}..{num_layers - 1 + first}"
        )
    if len(set(value)) != len(value):
        raise JaxkvError(f"{key} names a layer twice: {sorted(value)}")
    return [i - first for i in value]
