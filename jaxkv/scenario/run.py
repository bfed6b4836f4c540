"""Runs one scenario, and checks a scenario file."""

from pathlib import Path
from typing import Any

from jaxkv.errors import JaxkvError
from jaxkv.scenario.compare import Difference, compare_with_expects, compare_with_saved, has_expects
from jaxkv.scenario.op_replay import replay_ops
from jaxkv.scenario.plan_mode import plan_answer
from jaxkv.scenario.scenario import Scenario, load_json, load_scenario
from jaxkv.scenario.schedule_replay import replay_schedule


def run_scenario(scenario: Scenario) -> dict[str, Any]:
    """The answer. A cache that is refused as a whole is an answer too: {"error": {"type", "message"}}."""
    try:
        if scenario.mode == "plan":
            return plan_answer(scenario)
        return replay_schedule(scenario) if scenario.is_schedule else replay_ops(scenario)
    except JaxkvError as error:
        return {"mode": scenario.mode, "error": {"type": type(error).__name__, "message": str(error)}}


def saved_answer_path(path: Path) -> Path:
    """Where the saved answer to a scenario file is looked for: NAME.answer.json beside NAME.json."""
    return path.with_name(f"{path.name.removesuffix('.json')}.answer.json")


def check_file(path: Path) -> list[Difference]:
    """Runs the file and compares the answer with the saved one and with the file's `expect` objects.

    A saved answer counts for what no `expect` names. JaxkvError where there is nothing to compare with.
    """
    scenario = load_scenario(path)
    saved_path = saved_answer_path(path)
    saved = load_json(saved_path) if saved_path.exists() else None
    if saved is None and not has_expects(scenario):
        raise JaxkvError(
            f"{path}: nothing to compare with: no {saved_path.name} beside it, no 'expect' in it"
        )
    answer = run_scenario(scenario)
    found = compare_with_expects(scenario, answer)
    if saved is not None:
        found += compare_with_saved(scenario, answer, saved)
    return found
