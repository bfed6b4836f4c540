"""Which layer keeps what: the spellings found in config files.

Every reader takes the config and the value of its key and returns one word a layer, such as "full_attention",
"sliding_attention", "mamba" or "none". A family's own table says which caches a word stands for.
"""

from collections.abc import Callable
from typing import Any

from jaxkv.errors import JaxkvError
from jaxkv.model_config.text_config import TextConfig, layer_indices

Pattern = Callable[[TextConfig], list[str]]
KeyReader = Callable[[TextConfig, str, Any], list[str]]

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
RECURRENT, BOTH, NONE = "linear_attention", "hybrid", "none"

NEMOTRON_LETTERS = {"M": RECURRENT, "*": FULL, "-": NONE, "E": NONE}
"""`hybrid_override_pattern`: M Mamba 2, * attention, - dense MLP, E mixture of experts."""


def every_layer(word: str) -> Pattern:
    """All layers alike."""
    return lambda config: [word] * config.num_layers


def all_sliding_if_windowed(config: TextConfig) -> list[str]:
    """Every layer slides where `sliding_window` has a value, else none does."""
    return [FULL if config.get("sliding_window") is None else SLIDING] * config.num_layers


def upper_layers_slide(config: TextConfig) -> list[str]:
    """Layers from `max_window_layers` on slide, where `use_sliding_window` is true."""
    count = config.num_layers
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return [FULL] * count
    first = config.integer("max_window_layers", at_least=0)
    return [SLIDING if i >= first else FULL for i in range(count)]


def every_nth_full(period: int, other: str = SLIDING) -> Pattern:
    """Layers period-1, 2*period-1, ... are full, the others `other`."""
    return lambda config: [FULL if (i + 1) % period == 0 else other for i in range(config.num_layers)]


def samba_then_shared(config: TextConfig) -> list[str]:
    """Phi-4-mini-flash: in the first half recurrent and sliding layers take turns; then one recurrent and the
    only full layer, on which all others attend without a cache of their own.
    """
    count = config.num_layers
    half = count // 2
    period = config.integer("mb_per_layer")
    first = [RECURRENT if i % period == 0 else SLIDING for i in range(half)]
    return [*first, RECURRENT, FULL, *[NONE] * (count - half - 2)]


def _names(config: TextConfig, key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise JaxkvError(f"{key} must be a list of names, got {value!r}")
    return value


def _cycle(config: TextConfig, key: str, value: Any) -> list[str]:
    names = _names(config, key, value)
    if not names:
        raise JaxkvError(f"{key} must not be empty")
    return [names[i % len(names)] for i in range(config.num_layers)]


def _letters(config: TextConfig, key: str, value: Any) -> list[str]:
    if not isinstance(value, str) or set(value) - set(NEMOTRON_LETTERS):
        raise JaxkvError(f"{key} must be of the letters {' '.join(NEMOTRON_LETTERS)}, got {value!r}")
    return [NEMOTRON_LETTERS[letter] for letter in value]


def _full_at(other: str) -> KeyReader:
    def read(config: TextConfig, key: str, value: Any) -> list[str]:
        full = set(config.indices(key))
        return [FULL if i in full else other for i in range(config.num_layers)]

    return read


def _sliding_at(config: TextConfig, key: str, value: Any) -> list[str]:
    sliding = set(config.indices(key))
    return [SLIDING if i in sliding else FULL for i in range(config.num_layers)]


def _numbers(meaning: dict[int, str]) -> KeyReader:
    def read(config: TextConfig, key: str, value: Any) -> list[str]:
        if not isinstance(value, list) or any(type(n) is not int or n not in meaning for n in value):
            raise JaxkvError(f"{key} must be a list of {' and '.join(map(str, meaning))}, got {value!r}")
        return [meaning[n] for n in value]

    return read


def _period(config: TextConfig, key: str, value: Any) -> list[str]:
    period = config.integer(key)
    offset = config.integer("attn_layer_offset", at_least=0)
    if offset >= period:
        raise JaxkvError(f"attn_layer_offset {offset} is not below {key} {period}: no layer would attend")
    return [FULL if i % period == offset else RECURRENT for i in range(config.num_layers)]


def _interval(other: str) -> KeyReader:
    return lambda config, key, value: every_nth_full(config.integer(key), other)(config)


def _window_pattern(config: TextConfig, key: str, value: Any) -> list[str]:
    """A period whose last layer is full, or letters such as "LLLG", repeated."""
    if isinstance(value, str) and value and set(value) <= {"L", "G"}:
        return [FULL if value[i % len(value)] == "G" else SLIDING for i in range(config.num_layers)]
    if type(value) is int and value >= 1:
        return every_nth_full(value)(config)
    raise JaxkvError(f"{key} must be a number or letters L and G, got {value!r}")


def _one_based(config: TextConfig, key: str, value: Any) -> list[str]:
    """`linear_attn_config`: two lists of layer numbers that begin at 1 and share out all layers."""
    part, count = config.part(key), config.num_layers
    lists = {name: part.get(name) for name in ("full_attn_layers", "kda_layers")}
    full, linear = (layer_indices(f"{key}.{name}", value, count, 1) for name, value in lists.items())
    if sorted([*full, *linear]) != list(range(count)):
        raise JaxkvError(
            f"{key} has {len(full)} full_attn_layers and {len(linear)} kda_layers, which do not share out "
            f"num_hidden_layers = {count} layers"
        )
    return [FULL if i in set(full) else RECURRENT for i in range(count)]


PATTERN_KEYS: dict[str, KeyReader] = {
    "layer_types": _names,
    "layers_block_type": _names,
    "hybrid_override_pattern": _letters,
    "hybrid_layer_pattern": _numbers({0: FULL, 1: SLIDING}),
    "attn_type_list": _numbers({0: RECURRENT, 1: FULL}),
    "linear_attn_config": _one_based,
    "attn_layer_indices": _full_at(RECURRENT),
    "full_attn_idxs": _full_at(RECURRENT),
    "sliding_window_layers": _sliding_at,
    "attn_layer_period": _period,
    "full_attention_interval": _interval(RECURRENT),
    "sliding_window_pattern": _window_pattern,
    "_sliding_window_pattern": _window_pattern,
    "block_types": _cycle,
    "_block_types": _cycle,
    "global_attn_every_n_layers": _interval(SLIDING),
}
"""Keys that state the pattern, in the order in which they are looked for."""


def layer_words(config: TextConfig, when_silent: Pattern | None) -> list[str]:
    """One word a layer: what the file states, else the family's own pattern.

    Raises JaxkvError where the file's list is not as long as `num_hidden_layers`, or nothing states it.
    """
    for key, read in PATTERN_KEYS.items():
        value = config.get(key)
        if value is None:
            continue
        words = read(config, key, value)
        count = config.num_layers
        if len(words) != count:
            raise JaxkvError(f"{key} has {len(words)} entries, num_hidden_layers is {count}")
        return words
    if when_silent is None:
        raise JaxkvError(f"the model's config has none of the keys {', '.join(PATTERN_KEYS)}")
    return when_silent(config)
