"""Answers as JSON text that people can read: short lists stay on one line."""

import json
from typing import Any

WIDTH = 110


def answer_text(value: Any, indent: int = 0) -> str:
    """The value as indented JSON; what fits into a line of `WIDTH` characters is one line."""
    flat = json.dumps(value)
    if len(flat) + indent <= WIDTH or not isinstance(value, dict | list) or not value:
        return flat
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        lines = [f"{pad}{json.dumps(key)}: {answer_text(item, indent + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"
    if all(isinstance(item, int | float | str) for item in value):
        return flat
    lines = [pad + answer_text(item, indent + 1) for item in value]
    return "[\n" + ",\n".join(lines) + "\n" + " " * indent + "]"
