"""Traces with one `hash_ids` list a request: Mooncake's (512 tokens an id) and Bailian's (16)."""

from typing import Any

from jaxkv.lab.content import PrefixIds, runs_of
from jaxkv.lab.loading.lines import BadLine, LineReader, json_object, list_value, number, whole_number
from jaxkv.lab.trace import Trace, TraceRequest

MOONCAKE_BLOCK = 512
BAILIAN_BLOCK = 16


def load_mooncake(reader: LineReader) -> Trace:
    """`timestamp` in milliseconds; https://github.com/kvcache-ai/Mooncake."""
    return _load(reader, "mooncake", MOONCAKE_BLOCK, 1e-3)


def load_bailian(reader: LineReader) -> Trace:
    """`timestamp` in seconds, links between the turns of a chat;
    https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
    """
    return _load(reader, "bailian", BAILIAN_BLOCK, 1.0)


class _Prefixes:
    """Numbers prefixes in the order in which they appear: equal ids after different ones are different."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def numbers(self, ids: list[int]) -> list[int]:
        found: list[int] = []
        parent = -1
        for block_id in ids:
            parent = self._numbers.setdefault((parent, block_id), len(self._numbers))
            found.append(parent)
        return found


def _load(reader: LineReader, name: str, block_size: int, seconds: float) -> Trace:
    prefixes = _Prefixes()

    def parse(text: str, line: int) -> TraceRequest:
        values = json_object(text)
        length = whole_number(values, "input_length", 1)
        ids = _checked_ids(list_value(values, "hash_ids"), length, block_size)
        if name == "bailian":
            _check_links(values)
        return TraceRequest(
            name=f"line {line}",
            arrival=number(values, "timestamp") * seconds,
            num_prompt_tokens=length,
            num_output_tokens=max(1, whole_number(values, "output_length")),
            content=PrefixIds(block_size, length, runs_of(prefixes.numbers(ids))),
        )

    requests = sorted(reader.parse(reader.lines(), parse), key=lambda request: request.arrival)
    return Trace(reader.path, name, requests, block_size, reader.num_skipped)


def _checked_ids(ids: list[Any], length: int, block_size: int) -> list[int]:
    """The ids of all blocks, or of all full ones."""
    full, touched = length // block_size, -(-length // block_size)
    if len(ids) not in (full, touched):
        raise BadLine(
            f"input_length {length} takes {touched} hash_ids of {block_size} tokens, got {len(ids)}"
        )
    for block_id in ids:
        if isinstance(block_id, bool) or not isinstance(block_id, int):
            raise BadLine(f"a hash id must be a whole number, got {block_id!r}")
    return ids


def _check_links(values: dict[str, Any]) -> None:
    """The ids are chained by content, so the links between turns are only checked; -1: no parent."""
    for key in ("chat_id", "parent_chat_id"):
        value = values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < -1:
            raise BadLine(f"{key} must be a whole number of at least -1, got {value!r}")
    whole_number(values, "turn")
