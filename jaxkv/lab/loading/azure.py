"""Azure's public traces of 2023: arrival times and lengths, no content.

https://github.com/Azure/AzurePublicDataset, for Patel et al., Splitwise, ISCA 2024.
"""

from datetime import datetime

from jaxkv.errors import JaxkvError
from jaxkv.lab.content import Lengths
from jaxkv.lab.loading.lines import BadLine, LineReader
from jaxkv.lab.trace import Trace, TraceRequest

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def load_azure(reader: LineReader) -> Trace:
    """For admission, concurrency and preemption: nothing can hit."""
    lines = reader.lines()
    first = next(lines, None)
    if first is None or first[1].strip() != HEADER:
        raise JaxkvError(f"{reader.path}, line 1: the header {HEADER!r} is needed")
    parsed = sorted(reader.parse(lines, _parse), key=lambda item: item[0])
    start = parsed[0][0] if parsed else None
    requests = [
        TraceRequest(
            name=name,
            arrival=(when - start).total_seconds() if start is not None else 0.0,
            num_prompt_tokens=length,
            num_output_tokens=output,
            content=Lengths(length),
        )
        for when, name, length, output in parsed
    ]
    notes = ("The trace tells lengths only: nothing can hit, whatever the cache.",)
    return Trace(reader.path, "azure", requests, None, reader.num_skipped, has_content=False, notes=notes)


def _parse(text: str, line: int) -> tuple[datetime, str, int, int]:
    fields = text.strip().split(",")
    if len(fields) != 3:
        raise BadLine(f"3 fields are needed, got {len(fields)}")
    try:
        # Seven digits of a second are given, six are kept.
        when = datetime.fromisoformat(fields[0][:26])
    except ValueError:
        raise BadLine(f"{fields[0]!r} is not a time") from None
    if not (fields[1].isdecimal() and fields[2].isdecimal() and int(fields[1])):
        raise BadLine(f"lengths must be whole numbers, got {fields[1]!r} and {fields[2]!r}")
    return when, f"line {line}", int(fields[1]), max(1, int(fields[2]))
