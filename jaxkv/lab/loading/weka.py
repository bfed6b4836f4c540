"""Agentic sessions: one session a line, block ids as runs, sub-agents' conversations inside.

https://github.com/callanjfox/kv-cache-tester, re-encoded: a request is
`[t, input_length, output_length, api_time, think_time, runs]`.
"""

from collections.abc import Iterator
from typing import Any

from jaxkv.lab.content import PrefixIds, Run
from jaxkv.lab.loading.lines import (
    BadLine,
    LineReader,
    checked_number,
    checked_whole,
    json_object,
    list_value,
    number,
    text_value,
    whole_number,
)
from jaxkv.lab.trace import Trace, TraceRequest

_FIELDS = 6


def load_weka(reader: LineReader) -> Trace:
    """Ids are local to a session (a sub-agent shares its parent's), so that sessions share nothing here."""
    next_id = 0
    block_size: int | None = None

    def parse(text: str, line: int) -> list[TraceRequest]:
        nonlocal next_id, block_size
        values = json_object(text)
        size = whole_number(values, "block_size", 1)
        if block_size is not None and size != block_size:
            raise BadLine(f"block_size {size} differs from {block_size} of the lines before")
        start = number(values, "start_s")
        session = _Session(text_value(values, "session"), size, next_id)
        requests = list(session.requests(list_value(values, "requests"), start))
        if not requests:
            raise BadLine("a session without requests")
        block_size, next_id = size, session.next_id
        return requests

    sessions = list(reader.parse(reader.lines(), parse))
    requests = [request for session in sessions for request in session]
    requests.sort(key=lambda request: request.arrival)
    notes = (
        "Block ids are local to a session: a system prompt that sessions share in production is not shared "
        "here.",
    )
    return Trace(reader.path, "weka", requests, block_size, reader.num_skipped, notes=notes)


class _Session:
    """next_id: the first id that is free for the session after this one."""

    def __init__(self, name: str, block_size: int, first_id: int) -> None:
        self._name = name
        self._block_size = block_size
        self._first_id = first_id
        self._count = 0
        self.next_id = first_id

    def requests(self, entries: list[Any], start: float) -> Iterator[TraceRequest]:
        """In the order of the list. A sub-agent's times count from its own start."""
        for entry in entries:
            if isinstance(entry, dict):
                begin = start + number(entry, "t")
                yield from self.requests(list_value(entry, "requests"), begin)
            else:
                yield self._request(entry, start)

    def _request(self, entry: object, start: float) -> TraceRequest:
        if not isinstance(entry, list) or len(entry) != _FIELDS:
            raise BadLine(f"a request is a list of {_FIELDS} values, got {str(entry)[:40]}")
        length = checked_whole(entry[1], "input_length", 1)
        runs = tuple(self._run(run) for run in entry[5]) if isinstance(entry[5], list) else ()
        num_ids = sum(run.length for run in runs)
        if num_ids != length // self._block_size:
            raise BadLine(
                f"input_length {length} has {length // self._block_size} full blocks, the runs have {num_ids}"
            )
        self._count += 1
        return TraceRequest(
            name=f"{self._name}:{self._count}",
            arrival=start + checked_number(entry[0], "t"),
            num_prompt_tokens=length,
            num_output_tokens=max(1, checked_whole(entry[2], "output_length")),
            content=PrefixIds(self._block_size, length, runs),
        )

    def _run(self, run: object) -> Run:
        if not isinstance(run, list) or len(run) != 2:
            raise BadLine(f"a run is [first, count], got {str(run)[:40]}")
        first, count = checked_whole(run[0], "first id"), checked_whole(run[1], "count", 1)
        self.next_id = max(self.next_id, self._first_id + first + count)
        return Run(self._first_id + first, count)
