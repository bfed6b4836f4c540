"""Compares an answer with vLLM's answer, or with the `expect` objects of a scenario.

Of vLLM's answer these are compared: the plan's partition of layers, block sizes, page sizes and number of
blocks; the tokens of each chunk, hit tokens, results, which positions of a table are null, free blocks after
every step, counters; who was scheduled and who preempted. Block ids, the order of the free queue, the layout,
table widths and admission bounds are not.
"""

from collections.abc import Iterator, Mapping, Set
from decimal import Decimal
from typing import Any, NamedTuple

from jaxkv.scenario.scenario import Scenario


class Difference(NamedTuple):
    """One place where an answer is not what it should be."""

    path: str
    ours: Any
    expected: Any

    def __str__(self) -> str:
        return f"{self.path}: is {self.ours!r}, expected {self.expected!r}"


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()

_PLAN_KEYS = frozenset({"num_blocks", "max_model_len", "scheduler_block_size", "hash_block_size"})
_STEP_KEYS = frozenset({"tokens", "result", "hit_tokens", "free_blocks"})
_STATS_KEYS = frozenset(
    {"requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits"}
)
_REQUEST_KEYS = frozenset(
    {"num_prompt_tokens", "first_scheduled_step", "hit_tokens", "finished_step", "preemptions", "refused"}
)


def compare_with_expects(scenario: Scenario, answer: Mapping[str, Any]) -> list[Difference]:
    """What the `expect` objects say against the answer: only the keys that they name are looked at."""
    found: list[Difference] = []
    if scenario.expect is not None:
        found += _expected("answer", scenario.expect, answer)
    for index, op in enumerate(scenario.ops):
        if op.expect is not None:
            found += _expected(f"ops[{index}] {op.name}", op.expect, _item(answer.get("ops"), index))
    for request in scenario.requests:
        if request.expect is not None:
            entry = _get(answer.get("requests"), request.request_id)
            found += _expected(f"requests.{request.request_id}", request.expect, entry)
    return found


def has_expects(scenario: Scenario) -> bool:
    """Whether the file says itself what its answer must hold."""
    entries = (*scenario.ops, *scenario.requests)
    return scenario.expect is not None or any(entry.expect is not None for entry in entries)


def compare_with_saved(
    scenario: Scenario, answer: Mapping[str, Any], saved: Mapping[str, Any]
) -> list[Difference]:
    """Every compared value of a saved answer that ours does not share.

    A key that an `expect` object names is left to it: there the file says that the saved answer is not right.
    """
    if "error" in saved or "error" in answer:
        # Two engines word a refusal differently; what counts is that both refuse, or neither.
        same = ("error" in saved) == ("error" in answer)
        return [] if same else [Difference("error", _get(answer, "error"), _get(saved, "error"))]
    if scenario.mode == "plan":
        return list(_plan(scenario, answer, saved))
    return list((_schedule if scenario.is_schedule else _ops)(scenario, answer, saved))


def null_positions(table: list[list[int]]) -> list[list[int]]:
    """By group, the positions whose block is the null block."""
    return [[position for position, block in enumerate(group) if block == 0] for group in table]


def _expected(path: str, expect: Any, ours: Any) -> Iterator[Difference]:
    """Objects are compared key by key, lists item by item, floats to the decimals given; `max_x` bounds x.

    Single items of a list are named by an object with their indices as keys.
    """
    if isinstance(expect, Mapping):
        for key, value in expect.items():
            got = _get(ours, key)
            if key.startswith("max_") and got is MISSING:
                got = _get(ours, key.removeprefix("max_"))
                if not (_is_number(got) and _is_number(value) and got <= value):
                    yield Difference(f"{path}.{key}", got, value)
            else:
                yield from _expected(f"{path}.{key}", value, got)
    elif isinstance(expect, list) and isinstance(ours, list) and len(expect) == len(ours):
        for index, value in enumerate(expect):
            yield from _expected(f"{path}[{index}]", value, ours[index])
    elif not _equal(ours, expect):
        yield Difference(path, ours, expect)


def _equal(ours: Any, expect: Any) -> bool:
    if isinstance(expect, float) and _is_number(ours):
        exponent = Decimal(repr(expect)).as_tuple().exponent
        return isinstance(exponent, int) and round(float(ours), max(0, -exponent)) == expect
    return ours == expect and isinstance(ours, bool) == isinstance(expect, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plan(scenario: Scenario, answer: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[Difference]:
    known = _left_to_expect(scenario.expect)
    yield from _keys("plan", _PLAN_KEYS - known, answer, saved)
    if "groups" in known:
        return
    ours, theirs = answer["groups"], saved["groups"]
    if len(ours) != len(theirs):
        yield Difference("groups", f"{len(ours)} groups", f"{len(theirs)} groups")
        return
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        yield from _keys(f"groups[{index}]", {"layer_names"}, mine, other)
        yield from _keys(
            f"groups[{index}].spec", {"block_size", "page_size_bytes"}, mine["spec"], other["spec"]
        )
    # vLLM's answers state the bytes of a block for each worker.
    worker = saved["workers"][0] if "workers" in saved else saved
    yield from _keys("plan", {"bytes_per_block"}, answer, worker)


def _ops(scenario: Scenario, answer: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[Difference]:
    for index, op in enumerate(scenario.ops):
        where = f"ops[{index}] {op.name}"
        ours, theirs = _item(answer.get("ops"), index), _item(saved.get("ops"), index)
        if ours is MISSING or theirs is MISSING:
            yield Difference(where, ours, theirs)
            continue
        known = _left_to_expect(op.expect)
        keys = _STATS_KEYS if op.name == "stats" else _STEP_KEYS | {"op", "id", "num_tokens", "num_steps"}
        yield from _keys(where, keys - known, ours, theirs)
        yield from _tables(where, ours, theirs, known)
        if "steps" not in theirs or "steps" in known:
            continue
        steps = ours.get("steps", [])
        if len(steps) != len(theirs["steps"]):
            yield Difference(f"{where}.steps", _chunks(ours), _chunks(theirs))
            continue
        for number, (mine, other) in enumerate(zip(steps, theirs["steps"], strict=True)):
            yield from _keys(f"{where}.steps[{number}]", _STEP_KEYS - known, mine, other)
            yield from _tables(f"{where}.steps[{number}]", mine, other, known)


def _schedule(
    scenario: Scenario, answer: Mapping[str, Any], saved: Mapping[str, Any]
) -> Iterator[Difference]:
    known = _left_to_expect(scenario.expect)
    yield from _keys("schedule", {"num_steps", "final_free_blocks"} - known, answer, saved)
    for request in scenario.requests:
        ours = _get(answer["requests"], request.request_id)
        theirs = _get(saved["requests"], request.request_id)
        keys = _REQUEST_KEYS - _left_to_expect(request.expect)
        yield from _keys(f"requests.{request.request_id}", keys, ours, theirs)
    if "steps" in known:
        return
    for number, theirs in enumerate(saved["steps"]):
        ours = _item(answer.get("steps"), number)
        where = f"steps[{number}]"
        if ours is MISSING:
            yield Difference(where, MISSING, theirs["scheduled"])
            return
        yield from _keys(where, {"scheduled", "free_blocks", "running"}, ours, theirs)
        if ours.get("preempted", []) != theirs.get("preempted", []):
            yield Difference(f"{where}.preempted", ours.get("preempted", []), theirs.get("preempted", []))
        for request_id, table in theirs["block_tables"].items():
            mine = ours["block_tables"].get(request_id)
            if mine is not None and null_positions(mine) != null_positions(table):
                yield Difference(f"{where}.block_tables.{request_id}", mine, table)


def _left_to_expect(expect: Mapping[str, Any] | None) -> frozenset[str]:
    return frozenset(expect or ())


def _keys(where: str, keys: Set[str], ours: Any, theirs: Any) -> Iterator[Difference]:
    for key in theirs if isinstance(theirs, Mapping) else ():
        if key in keys and _get(ours, key) != theirs[key]:
            yield Difference(f"{where}.{key}", _get(ours, key), theirs[key])


def _tables(
    where: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], known: Set[str]
) -> Iterator[Difference]:
    for key in ("block_tables", "hit_blocks"):
        # Where the file says itself how long the hit is, its blocks are not the saved answer's either.
        if key not in theirs or key in known or (key == "hit_blocks" and "hit_tokens" in known):
            continue
        mine = ours.get(key, [])
        lengths = [len(group) for group in mine], [len(group) for group in theirs[key]]
        if lengths[0] != lengths[1]:
            yield Difference(f"{where}.{key}", f"blocks by group {lengths[0]}", lengths[1])
        elif null_positions(mine) != null_positions(theirs[key]):
            yield Difference(
                f"{where}.{key} (null positions)", null_positions(mine), null_positions(theirs[key])
            )


def _chunks(entry: Mapping[str, Any]) -> list[Any]:
    return [step.get("tokens") for step in entry.get("steps", [])]


def _item(items: Any, index: int) -> Any:
    return items[index] if isinstance(items, list) and index < len(items) else MISSING


def _get(entry: Any, key: str) -> Any:
    if isinstance(entry, list) and key.isdecimal():
        return _item(entry, int(key))
    return entry.get(key, MISSING) if isinstance(entry, Mapping) else MISSING
