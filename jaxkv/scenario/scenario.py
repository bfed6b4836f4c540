"""One scenario: what a file states, read strictly."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxkv.errors import JaxkvError
from jaxkv.scenario.config import ScenarioConfig, parse_config
from jaxkv.scenario.fields import Fields
from jaxkv.scenario.layer_specs import GroupEntry, LayerEntry, parse_groups, parse_layers
from jaxkv.scenario.ops import Op, ScheduledRequest, parse_ops, parse_schedule


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A plan (`layers`, `available_memory`) or a replay (`groups`, `num_blocks`, and `ops` or `requests`).

    is_schedule: a replay of `requests`, not of `ops`; either may be empty.
    expect: what the whole answer must hold; ops and requests have theirs.
    """

    mode: str
    description: str
    config: ScenarioConfig
    layers: tuple[LayerEntry, ...] = ()
    available_memory: int = 0
    groups: tuple[GroupEntry, ...] = ()
    num_blocks: int = 0
    is_schedule: bool = False
    ops: tuple[Op, ...] = ()
    requests: tuple[ScheduledRequest, ...] = ()
    expect: Mapping[str, Any] | None = None


def parse_scenario(raw: Any) -> Scenario:
    """Reads one scenario. Raises JaxkvError that names the unknown key, the missing one or the bad value."""
    fields = Fields(raw, "scenario")
    mode = fields.choice("mode", ("plan", "replay"))
    config = parse_config(fields.value("config", {}))
    common: dict[str, Any] = {
        "mode": mode,
        "description": fields.text("description", ""),
        "config": config,
        "expect": fields.expect(),
    }
    if mode == "plan":
        common["layers"] = parse_layers(fields, config)
        common["available_memory"] = fields.integer("available_memory")
    else:
        common["groups"] = parse_groups(fields.items("groups"), config)
        common["num_blocks"] = fields.integer("num_blocks", minimum=2)
        if fields.has("ops") == fields.has("schedule"):
            raise JaxkvError("scenario: a replay has either 'ops' or 'schedule'")
        common["is_schedule"] = fields.has("schedule")
        if fields.has("ops"):
            common["ops"] = parse_ops(fields.items("ops"))
        else:
            common["requests"] = parse_schedule(fields.value("schedule"))
    fields.finish()
    return Scenario(**common)


def load_scenario(path: Path) -> Scenario:
    """Reads a scenario file. Raises JaxkvError that names the file."""
    raw = load_json(path)
    try:
        return parse_scenario(raw)
    except JaxkvError as error:
        raise JaxkvError(f"{path}: {error}") from None


def load_json(path: Path) -> Any:
    """The file's JSON value. Raises JaxkvError where it cannot be read or is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repeated_keys)
    except OSError as error:
        raise JaxkvError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise JaxkvError(f"{path}: {error}") from None


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        raise JaxkvError(f"a key stands twice in one object: {', '.join(repeated)}")
    return result
