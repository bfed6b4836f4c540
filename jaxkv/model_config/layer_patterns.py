"""Which layers are full attention and which slide: the spellings found in config files.

Every function takes the config and returns one kind ("full", "sliding_window", "chunked_local") a layer.
"""

from collections.abc import Callable
from typing import Any

from jaxkv.errors import JaxkvError
from jaxkv.model_config.text_config import TextConfig

Pattern = Callable[[TextConfig], list[str]]

FULL, SLIDING, CHUNKED = "full", "sliding_window", "chunked_local"

LAYER_TYPE_NAMES = {
    "full_attention": FULL,
    "attention": FULL,
    "sliding_attention": SLIDING,
    "chunked_attention": CHUNKED,
}
"""What `layer_types` calls each kind."""


def all_full(config: TextConfig) -> list[str]:
    """Every layer keeps every token."""
    return [FULL] * config.num_layers


def all_sliding_if_windowed(config: TextConfig) -> list[str]:
    """Every layer slides where `sliding_window` has a value, else none does."""
    kind = FULL if config.get("sliding_window") is None else SLIDING
    return [kind] * config.num_layers


def upper_layers_slide(config: TextConfig) -> list[str]:
    """Layers from `max_window_layers` on slide, where `use_sliding_window` is true."""
    count = config.num_layers
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return [FULL] * count
    first = config.integer("max_window_layers", at_least=0)
    return [SLIDING if i >= first else FULL for i in range(count)]


def every_nth_full(period: int, local: str = SLIDING) -> Pattern:
    """Layers period-1, 2*period-1, ... are full, the others `local`."""

    def pattern(config: TextConfig) -> list[str]:
        count = config.num_layers
        return [FULL if (i + 1) % period == 0 else local for i in range(count)]

    return pattern


def from_layer_types(config: TextConfig, value: Any) -> list[str]:
    """`layer_types`: one name a layer."""
    if not isinstance(value, list):
        raise JaxkvError(f"layer_types must be a list of names, got {value!r}")
    unknown = [name for name in value if not isinstance(name, str) or name not in LAYER_TYPE_NAMES]
    if unknown:
        raise JaxkvError(f"layer_types has {unknown[0]!r}; known are {', '.join(LAYER_TYPE_NAMES)}")
    return [LAYER_TYPE_NAMES[name] for name in value]


def from_window_pattern(config: TextConfig, value: Any) -> list[str]:
    """`sliding_window_pattern`: a period whose last layer is full, or letters such as "LLLG", repeated."""
    count = config.num_layers
    if isinstance(value, str) and value and set(value) <= {"L", "G"}:
        return [FULL if value[i % len(value)] == "G" else SLIDING for i in range(count)]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return every_nth_full(value)(config)
    raise JaxkvError(f"sliding_window_pattern must be a number or letters L and G, got {value!r}")


PATTERN_KEYS: dict[str, Callable[[TextConfig, Any], list[str]]] = {
    "layer_types": from_layer_types,
    "sliding_window_pattern": from_window_pattern,
    "_sliding_window_pattern": from_window_pattern,
}
"""Keys that state the pattern, in the order in which they are looked for."""


def layer_kinds(config: TextConfig, when_silent: Pattern) -> list[str]:
    """One kind a layer: what the file states, else the family's own pattern.

    Raises JaxkvError where the file's list is not as long as `num_hidden_layers`.
    """
    for key, read in PATTERN_KEYS.items():
        value = config.get(key)
        if value is None:
            continue
        kinds = read(config, value)
        count = config.num_layers
        if len(kinds) != count:
            raise JaxkvError(f"{key} has {len(kinds)} entries, num_hidden_layers is {count}")
        return kinds
    return when_silent(config)
