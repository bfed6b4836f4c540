"""Traces of text: recorded sessions, and chats as they are sent to an OpenAI-style server."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxkv.lab.content import Tokens
from jaxkv.lab.loading.lines import (
    BadLine,
    LineReader,
    json_object,
    list_value,
    number,
    text_value,
    whole_number,
)
from jaxkv.lab.trace import Trace, TraceRequest

Tokenize = Callable[[str], list[int]]


def utf8_bytes(text: str) -> list[int]:
    """A token a byte: a tokenizer that needs no file. Lone surrogates, which JSON allows, are kept apart."""
    return list(text.encode("utf-8", "surrogatepass"))


def load_sessions(reader: LineReader, tokenize: Tokenize = utf8_bytes) -> Trace:
    """`session`, `turn`, `t_us`, `input`, `output`; every session starts at time 0."""

    def parse(text: str, line: int) -> TraceRequest:
        values = json_object(text)
        turn = whole_number(values, "turn")
        name = f"{text_value(values, 'session')}:{turn}"
        return _request(
            name,
            number(values, "t_us") * 1e-6,
            tokenize(text_value(values, "input")),
            tokenize(text_value(values, "output")),
        )

    requests = sorted(reader.parse(reader.lines(), parse), key=lambda request: request.arrival)
    return Trace(reader.path, "sessions", requests, None, reader.num_skipped)


def load_chats(reader: LineReader, tokenize: Tokenize = utf8_bytes) -> Trace:
    """Bodies of chat completion requests: `messages`, each with `role` and `content`; `max_tokens`,
    `timestamp` (seconds) and `response` (the answer's text) where they are known.

    Messages are written one after the other as "<|role|>\\ncontent\\n", which is nobody's chat template: give
    the prompts as text sessions where that matters. A trailing assistant message is the recorded answer.
    """

    def parse(text: str, line: int) -> TraceRequest:
        values = json_object(text)
        messages = [_message(message) for message in list_value(values, "messages")]
        if not messages:
            raise BadLine("messages is empty")
        answer = values.get("response")
        if answer is None and messages[-1][0] == "assistant" and len(messages) > 1:
            answer = messages.pop()[1]
        if answer is not None and not isinstance(answer, str):
            raise BadLine("response must be a text")
        prompt = "".join(f"<|{role}|>\n{content}\n" for role, content in messages) + "<|assistant|>\n"
        limit = whole_number(values, "max_tokens", 1) if "max_tokens" in values else None
        arrival = number(values, "timestamp") if "timestamp" in values else float(line)
        return _request(f"line {line}", arrival, tokenize(prompt), tokenize(answer or ""), limit)

    requests = sorted(reader.parse(reader.lines(), parse), key=lambda request: request.arrival)
    notes = ("Messages are joined by a plain template, not the model's own.",)
    return Trace(reader.path, "chats", requests, None, reader.num_skipped, notes=notes)


def _message(message: Any) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise BadLine(f"a message must be an object, got {str(message)[:40]}")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        parts = [text for text in texts if isinstance(text, str)]
        if len(parts) != len(content):
            raise BadLine("only text parts of a message can be replayed")
        content = "".join(parts)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise BadLine(f"the content of a message must be a text, got {str(content)[:40]}")
    return text_value(message, "role"), content


def _request(
    name: str, arrival: float, prompt: list[int], answer: list[int], limit: int | None = None
) -> TraceRequest:
    if not prompt:
        raise BadLine("the prompt is empty")
    kept = answer if limit is None else answer[:limit]
    return TraceRequest(
        name=name,
        arrival=arrival,
        num_prompt_tokens=len(prompt),
        # An answer that was not recorded is as long as it may be.
        num_output_tokens=max(1, len(kept) if answer or limit is None else limit),
        content=Tokens(np.array(prompt, np.int32), np.array(kept, np.int32)),
    )
