"""Compares an answer with vLLM's answer, or with the `expect` objects of a scenario.

Of vLLM's answer these are compared: the plan's partition of layers, block sizes, page sizes and number of
blocks; the tokens of each chunk, hit tokens, results, which positions of a table are null, free blocks after
every step, counters; who was scheduled and who preempted. Block ids, the order of the free queue, the layout,
table widths and admission bounds are not.
"""

from collections.abc import Iterator, Mapping
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

_STEP_KEYS = ("tokens", "result", "hit_tokens", "free_blocks")
_STATS_KEYS = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
_PLAN_KEYS = ("num_blocks", "max_model_len", "scheduler_block_size", "hash_block_size")


def compare_with_expects(scenario: Scenario, answer: Mapping[str, Any]) -> list[Difference]:
    """What the `expect` objects say against the answer: only the keys that they name are looked at."""
    found = list(_expected("answer", scenario.expect, answer))
    for index, op in enumerate(scenario.ops):
        if op.expect is not None:
            found += _expected(f"ops[{index}] {op.name}", op.expect, _item(answer.get("ops"), index))
    for request in scenario.requests:
        if request.expect is not None:
            requests = answer.get("requests")
            entry = requests.get(request.request_id) if isinstance(requests, Mapping) else None
            found += _expected(f"requests.{request.request_id}", request.expect, entry)
    return found


def has_expects(scenario: Scenario) -> bool:
    """Whether the file says itself what its answer must hold."""
    entries = (*scenario.ops, *scenario.requests)
    return scenario.expect is not None or any(entry.expect is not None for entry in entries)


def compare_with_vllm(answer: Mapping[str, Any], vllm: Mapping[str, Any]) -> list[Difference]:
    """Every compared value of vLLM's answer that ours does not share."""
    if "error" in vllm or "error" in answer:
        # Two engines word a refusal differently; what counts is that both refuse, or neither.
        same = ("error" in vllm) == ("error" in answer)
        return [] if same else [Difference("error", answer.get("error", MISSING), vllm.get("error", MISSING))]
    if vllm.get("mode") == "plan":
        return list(_plan(answer, vllm))
    return list(_ops(answer, vllm) if "ops" in vllm else _schedule(answer, vllm))


def null_positions(table: list[list[int]]) -> list[list[int]]:
    """By group, the positions whose block is the null block."""
    return [[position for position, block in enumerate(group) if block == 0] for group in table]


def _expected(path: str, expect: Any, ours: Any) -> Iterator[Difference]:
    """Objects are compared key by key, lists whole, floats to the decimals given; `max_x` bounds x."""
    if expect is None:
        return
    for key, value in expect.items():
        where = f"{path}.{key}"
        got = ours.get(key, MISSING) if isinstance(ours, Mapping) else MISSING
        bound = key.startswith(("max_", "min_"))
        if got is MISSING and bound:
            got = ours.get(key[4:], MISSING) if isinstance(ours, Mapping) else MISSING
        else:
            bound = False
        if bound and got is not MISSING:
            if not (got <= value if key.startswith("max_") else got >= value):
                yield Difference(where, got, value)
        elif isinstance(value, Mapping):
            yield from _expected(where, value, got)
        elif not _equal(got, value):
            yield Difference(where, got, value)


def _equal(got: Any, value: Any) -> bool:
    if isinstance(value, float) and isinstance(got, int | float) and not isinstance(got, bool):
        decimals = len(str(value).partition(".")[2])
        return round(float(got), decimals) == value
    return got == value and isinstance(got, bool) == isinstance(value, bool)


def _plan(answer: Mapping[str, Any], vllm: Mapping[str, Any]) -> Iterator[Difference]:
    yield from _keys("plan", _PLAN_KEYS, answer, vllm)
    ours, theirs = answer["groups"], vllm["groups"]
    if len(ours) != len(theirs):
        yield Difference("groups", f"{len(ours)} groups", f"{len(theirs)} groups")
        return
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        where = f"groups[{index}]"
        spec = other["spec"]
        yield from _keys(where, ("layer_names",), mine, other)
        yield from _keys(where, ("block_size", "page_size_bytes"), mine, spec)
    yield from _keys("workers[0]", ("bytes_per_block",), answer, vllm["workers"][0])


def _ops(answer: Mapping[str, Any], vllm: Mapping[str, Any]) -> Iterator[Difference]:
    for index, theirs in enumerate(vllm["ops"]):
        where = f"ops[{index}] {theirs['op']}"
        ours = _item(answer.get("ops"), index)
        if ours is MISSING:
            yield Difference(where, MISSING, "an answer")
            continue
        yield from _keys(where, ("op", "id", "num_tokens"), ours, theirs)
        yield from _keys(where, _STATS_KEYS if theirs["op"] == "stats" else _STEP_KEYS, ours, theirs)
        yield from _tables(where, ours, theirs)
        if "steps" not in theirs:
            continue
        yield from _keys(where, ("num_steps",), ours, theirs)
        if len(ours.get("steps", [])) != len(theirs["steps"]):
            yield Difference(f"{where}.steps", _chunks(ours), _chunks(theirs))
            continue
        for number, step in enumerate(theirs["steps"]):
            mine = ours["steps"][number]
            yield from _keys(f"{where}.steps[{number}]", _STEP_KEYS, mine, step)
            yield from _tables(f"{where}.steps[{number}]", mine, step)


def _schedule(answer: Mapping[str, Any], vllm: Mapping[str, Any]) -> Iterator[Difference]:
    yield from _keys("schedule", ("num_steps", "final_free_blocks"), answer, vllm)
    for request_id, theirs in vllm["requests"].items():
        keys = ("num_prompt_tokens", "first_scheduled_step", "hit_tokens", "finished_step", "preemptions")
        yield from _keys(f"requests.{request_id}", keys, answer["requests"].get(request_id, {}), theirs)
    for number, theirs in enumerate(vllm["steps"]):
        ours = _item(answer.get("steps"), number)
        where = f"steps[{number}]"
        if ours is MISSING:
            yield Difference(where, MISSING, theirs["scheduled"])
            return
        yield from _keys(where, ("scheduled", "free_blocks", "running"), ours, theirs)
        if ours.get("preempted", []) != theirs.get("preempted", []):
            yield Difference(f"{where}.preempted", ours.get("preempted", []), theirs.get("preempted", []))
        for request_id, table in theirs["block_tables"].items():
            mine = ours["block_tables"].get(request_id)
            if mine is not None and null_positions(mine) != null_positions(table):
                yield Difference(f"{where}.block_tables.{request_id}", mine, table)


def _keys(
    where: str, keys: tuple[str, ...], ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Iterator[Difference]:
    for key in keys:
        if key in theirs and ours.get(key, MISSING) != theirs[key]:
            yield Difference(f"{where}.{key}", ours.get(key, MISSING), theirs[key])


def _tables(where: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Difference]:
    for key in ("block_tables", "hit_blocks"):
        if key not in theirs:
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
