"""Reads the specs of a scenario: the layers of a plan and the groups of a replay."""

from collections import Counter
from typing import Any, NamedTuple

from jaxkv.errors import JaxkvError
from jaxkv.model_config.text_config import MAX_LAYERS
from jaxkv.scenario.config import ScenarioConfig
from jaxkv.scenario.fields import REQUIRED, Fields
from jaxkv.specs import SPEC_KINDS, KVCacheSpec


class GroupEntry(NamedTuple):
    """One group of a replay."""

    spec: KVCacheSpec
    is_eagle_group: bool


class LayerEntry(NamedTuple):
    """One layer of a plan."""

    name: str
    spec: KVCacheSpec


def parse_groups(raw: list[Any], config: ScenarioConfig) -> tuple[GroupEntry, ...]:
    """The groups of a replay, in order."""
    if not raw:
        raise JaxkvError("groups must hold at least one group")
    entries = []
    for index, item in enumerate(raw):
        fields = Fields(item, f"groups[{index}]")
        spec_fields = Fields(fields.value("spec"), f"groups[{index}].spec")
        entries.append(GroupEntry(_parse_spec(spec_fields, config), fields.boolean("is_eagle_group", False)))
        spec_fields.finish()
        fields.finish()
    return tuple(entries)


def parse_layers(fields: Fields, config: ScenarioConfig) -> tuple[LayerEntry, ...]:
    """The layers of a plan: `layers` by name (with a `count`: name.0, name.1, ...), then those of `patterns`.

    The layers of patterns are numbered through: layer.0, layer.1, ...
    """
    entries: list[LayerEntry] = []
    for index, item in enumerate(fields.items("layers", [])):
        layer = Fields(item, f"layers[{index}]")
        name = layer.text("name")
        counted = layer.has("count")
        count = layer.integer("count", 1, minimum=1)
        _check_number(layer, len(entries) + count)
        spec = _parse_spec(layer, config)
        layer.finish()
        entries += [LayerEntry(f"{name}.{i}" if counted else name, spec) for i in range(count)]
    number = 0
    for index, item in enumerate(fields.items("patterns", [])):
        pattern = Fields(item, f"patterns[{index}]")
        specs = _parse_pattern_layers(pattern, config)
        repeat = pattern.integer("repeat", 1, minimum=1)
        _check_number(pattern, len(entries) + repeat * len(specs))
        for _ in range(repeat):
            for spec in specs:
                entries.append(LayerEntry(f"layer.{number}", spec))
                number += 1
        pattern.finish()
    if not entries:
        raise JaxkvError("a plan needs 'layers' or 'patterns' with at least one layer")
    counts = Counter(entry.name for entry in entries)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise JaxkvError(f"layer names must differ; repeated: {', '.join(repeated)}")
    return tuple(entries)


def _check_number(fields: Fields, number: int) -> None:
    if number > MAX_LAYERS:
        raise JaxkvError(f"{fields.where}: {number} layers are more than {MAX_LAYERS}")


def _parse_pattern_layers(pattern: Fields, config: ScenarioConfig) -> list[KVCacheSpec]:
    specs: list[KVCacheSpec] = []
    for index, item in enumerate(pattern.items("layers")):
        layer = Fields(item, f"{pattern.where}.layers[{index}]")
        count = layer.integer("count", 1, minimum=1)
        _check_number(layer, len(specs) + count)
        specs += [_parse_spec(layer, config)] * count
        layer.finish()
    return specs


def _parse_spec(fields: Fields, config: ScenarioConfig) -> KVCacheSpec:
    kind = fields.choice("kind", tuple(SPEC_KINDS))
    values: dict[str, Any] = {
        "block_size": fields.integer("block_size", config.block_size, minimum=1),
        "is_draft": fields.boolean("is_draft", False),
    }
    if fields.has("page_size_padded"):
        values["page_size_padded"] = fields.optional_integer("page_size_padded", minimum=1)
    if kind == "mamba":
        values |= _state(fields, config)
    else:
        values |= _attention(fields, kind)
    return SPEC_KINDS[kind](**values)


def _attention(fields: Fields, kind: str) -> dict[str, Any]:
    """Keys of the kinds with keys and values; a latent cache has one head and no V unless it says so."""
    latent = kind in ("mla", "sliding_window_mla")
    values: dict[str, Any] = {
        "num_kv_heads": fields.integer("num_kv_heads", 1 if latent else REQUIRED, minimum=1),
        "head_size": fields.integer("head_size", minimum=1),
        "dtype": fields.text("dtype", "bfloat16"),
    }
    if fields.has("head_size_v"):
        values["head_size_v"] = fields.optional_integer("head_size_v")
    if kind in ("sliding_window", "sliding_window_mla"):
        values["sliding_window"] = fields.integer("sliding_window", minimum=1)
    if kind == "chunked_local":
        values["attention_chunk_size"] = fields.integer("attention_chunk_size", minimum=1)
    return values


def _state(fields: Fields, config: ScenarioConfig) -> dict[str, Any]:
    shapes = fields.items("shapes")
    if not all(isinstance(shape, list) for shape in shapes):
        raise JaxkvError(f"{fields.where}: 'shapes' must be a list of lists of sizes, not {shapes!r}")
    return {
        "shapes": tuple(tuple(shape) for shape in shapes),
        "dtypes": tuple(fields.items("dtypes")),
        "mamba_cache_mode": config.resolved_mamba_cache_mode,
        "num_speculative_blocks": fields.integer("num_speculative_blocks", config.num_speculative_tokens),
    }
