"""The formats of traces, by name, and how a file's format is told."""

import json
from collections.abc import Callable
from typing import Any

from jaxkv.errors import JaxkvError
from jaxkv.lab.loading.azure import HEADER, load_azure
from jaxkv.lab.loading.hash_ids import load_bailian, load_mooncake
from jaxkv.lab.loading.lines import LineReader
from jaxkv.lab.loading.text import Tokenize, load_chats, load_sessions, utf8_bytes
from jaxkv.lab.loading.weka import load_weka
from jaxkv.lab.trace import Trace

_PLAIN: dict[str, Callable[[LineReader], Trace]] = {
    "mooncake": load_mooncake,
    "bailian": load_bailian,
    "weka": load_weka,
    "azure": load_azure,
}
_OF_TEXT: dict[str, Callable[[LineReader, Tokenize], Trace]] = {
    "sessions": load_sessions,
    "chats": load_chats,
}
FORMATS = (*_PLAIN, *_OF_TEXT)
"""The names that can be asked for."""


def load_trace(
    path: str,
    trace_format: str | None = None,
    *,
    tokenize: Tokenize = utf8_bytes,
    skip_bad_lines: bool = False,
) -> Trace:
    """The trace in a file. The format is told from its first good line where it is not given.

    Raises JaxkvError that names the line for a file that is cut short, empty or of mixed formats;
    `skip_bad_lines` counts such lines instead, as long as one is good.
    """
    name = trace_format or _detect(path)
    reader = LineReader(path, skip_bad_lines)
    if name in _PLAIN:
        trace = _PLAIN[name](reader)
    elif name in _OF_TEXT:
        trace = _OF_TEXT[name](reader, tokenize)
    else:
        raise JaxkvError(f"unknown trace format {name!r}; known are {', '.join(FORMATS)}")
    if not trace.requests:
        skipped = f": all {reader.num_skipped} lines are bad" if reader.num_skipped else ""
        raise JaxkvError(f"{path} holds no request{skipped}")
    return trace


def _detect(path: str) -> str:
    first: tuple[int, str] | None = None
    for number, text in LineReader(path, skip_bad_lines=True).lines():
        first = first or (number, text)
        name = _format_of_line(text)
        if name is not None:
            return name
    if first is None:
        raise JaxkvError(f"{path} is empty: it holds no request")
    raise JaxkvError(
        f"{path}, line {first[0]}: no known trace format ({', '.join(FORMATS)}) has such a line: "
        f"{first[1].strip()[:60]!r}"
    )


def _format_of_line(text: str) -> str | None:
    if text.strip() == HEADER:
        return "azure"
    try:
        values: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    if "hash_ids" in values:
        return "bailian" if "chat_id" in values else "mooncake"
    if "requests" in values and "block_size" in values:
        return "weka"
    if "messages" in values:
        return "chats"
    return "sessions" if "input" in values and "session" in values else None
