"""Layers given one by one in a file, for models whose configuration no reader knows."""

from pathlib import Path
from typing import NamedTuple

from jaxkv.errors import JaxkvError
from jaxkv.scenario.config import ScenarioConfig
from jaxkv.scenario.fields import Fields
from jaxkv.scenario.layer_specs import parse_layers
from jaxkv.scenario.scenario import load_json
from jaxkv.specs import KVCacheSpec


class LayerList(NamedTuple):
    """specs: by layer name. max_model_len: None where the file does not say."""

    specs: dict[str, KVCacheSpec]
    max_model_len: int | None


def read_layer_list(path: str, block_size: int) -> LayerList:
    """Reads `{"layers": [...], "patterns": [...], "max_model_len": n}`, layers written as in scenarios of
    mode plan.

    block_size: of layers that state none. Raises JaxkvError that names the file and the key.
    """
    raw = load_json(Path(path))
    try:
        fields = Fields(raw, "the list of layers")
        entries = parse_layers(fields, ScenarioConfig(block_size=block_size))
        longest = fields.optional_integer("max_model_len", minimum=1)
        fields.finish()
    except JaxkvError as error:
        raise JaxkvError(f"{path}: {error}") from None
    return LayerList({entry.name: entry.spec for entry in entries}, longest)
