"""The operations and scheduled requests of a replay, read and checked before the first one runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxkv.errors import JaxkvError
from jaxkv.scenario.fields import Fields
from jaxkv.scenario.tokens import parse_tokens

OP_NAMES = (
    "new",
    "lookup",
    "prefill",
    "step",
    "decode",
    "preempt",
    "free",
    "reset_prefix_cache",
    "pool",
    "stats",
    "events",
)


#: An answer has an entry for every step, so nothing may arrive later.
MAX_ARRIVAL_STEP = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Op:
    """One call.

    tokens: of `new`: the request's token ids; of `decode`: the tokens to append (None: the default ones).
    chunk, upto: of `prefill`: most tokens a step (None: the config's) and the length to stop at (None: all).
    num_tokens: of `step`: most tokens of this one step.
    n: of `decode`: how many tokens.
    verbose: of `prefill` and `decode`: whether every step is in the answer (a prefill's always are).
    new_step: whether the op's first chunk starts an engine step of its own.
    """

    name: str
    request_id: str = ""
    tokens: np.ndarray | None = None
    chunk: int | None = None
    upto: int | None = None
    num_tokens: int = 0
    n: int = 1
    verbose: bool = False
    new_step: bool = True
    cache_salt: str | None = None
    lora_name: str | None = None
    expect: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ScheduledRequest:
    """A request for the scheduler: it arrives before step `arrival_step` and makes `output_len` tokens."""

    request_id: str
    tokens: np.ndarray
    output_len: int
    arrival_step: int
    expect: Mapping[str, Any] | None = None


def parse_ops(raw: list[Any]) -> tuple[Op, ...]:
    """Reads the ops. An op on a request that no earlier `new` made, or that was freed, is refused."""
    ops = []
    live: set[str] = set()
    for index, item in enumerate(raw):
        op = _parse_op(Fields(item, f"ops[{index}]"))
        if op.name == "new":
            if op.request_id in live:
                raise JaxkvError(f"ops[{index}]: request {op.request_id!r} exists already")
            live.add(op.request_id)
        elif op.request_id and op.request_id not in live:
            raise JaxkvError(f"ops[{index}]: no request {op.request_id!r}; there are {sorted(live)}")
        if op.name == "free":
            live.remove(op.request_id)
        ops.append(op)
    return tuple(ops)


def parse_schedule(raw: Any) -> tuple[ScheduledRequest, ...]:
    """Reads `schedule`: its requests in order of arrival within a step."""
    fields = Fields(raw, "schedule")
    requests = []
    for index, item in enumerate(fields.items("requests")):
        entry = Fields(item, f"schedule.requests[{index}]")
        requests.append(
            ScheduledRequest(
                request_id=entry.text("id"),
                tokens=parse_tokens(entry.value("tokens"), f"{entry.where}.tokens"),
                output_len=entry.integer("output_len", 1, minimum=1),
                arrival_step=entry.integer("arrival_step", 0),
                expect=entry.expect(),
            )
        )
        entry.finish()
        if requests[-1].arrival_step > MAX_ARRIVAL_STEP:
            raise JaxkvError(
                f"{entry.where}: 'arrival_step' is {requests[-1].arrival_step}; it must be at most "
                f"{MAX_ARRIVAL_STEP}"
            )
    fields.finish()
    ids = [request.request_id for request in requests]
    if len(set(ids)) != len(ids):
        raise JaxkvError(f"schedule: request ids must differ, got {ids}")
    return tuple(requests)


def _parse_op(fields: Fields) -> Op:
    name = fields.choice("op", OP_NAMES)
    values: dict[str, Any] = {"name": name, "expect": fields.expect()}
    if name in ("new", "lookup", "prefill", "step", "decode", "preempt", "free"):
        values["request_id"] = fields.text("id")
        if not values["request_id"]:
            raise JaxkvError(f"{fields.where}: 'id' must not be empty")
    if name == "new":
        values["tokens"] = parse_tokens(fields.value("tokens"), f"{fields.where}.tokens")
        values["cache_salt"] = fields.optional_text("cache_salt")
        values["lora_name"] = fields.optional_text("lora_name")
    if name == "prefill":
        values["chunk"] = fields.optional_integer("chunk", minimum=1)
        values["upto"] = fields.optional_integer("upto", minimum=1)
    if name == "step":
        values["num_tokens"] = fields.integer("num_tokens", minimum=1)
    if name == "decode":
        values["n"] = fields.integer("n", 1, minimum=1)
        if fields.has("tokens"):
            values["tokens"] = parse_tokens(fields.value("tokens"), f"{fields.where}.tokens")
            if len(values["tokens"]) != values["n"]:
                raise JaxkvError(
                    f"{fields.where}: n is {values['n']} but {len(values['tokens'])} tokens are given"
                )
        values["verbose"] = fields.boolean("verbose", False)
    if name in ("prefill", "step", "decode"):
        values["new_step"] = fields.boolean("new_step", True)
    fields.finish()
    return Op(**values)
