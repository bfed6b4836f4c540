"""Token rules: how a scenario states token ids without listing them."""

from typing import Any

import numpy as np

from jaxkv.errors import JaxkvError
from jaxkv.scenario.fields import Fields

#: Ids stay below this, so that every rule gives a valid int32.
TOKEN_LIMIT = 1 << 31

#: No rule may make a longer sequence: a scenario is a small file.
MAX_TOKENS = 1 << 24

#: The token a decode step appends at position p, where the scenario names none, is this plus p.
DECODE_TOKEN_BASE = 1_000_000


def parse_tokens(raw: Any, where: str) -> np.ndarray:
    """The token ids that a rule stands for, int32[n], n >= 1.

    A rule is a list of ids, {"seed", "len"}, {"range": [first, last + 1]}, {"repeat": [id, count]} or
    {"concat": [rules]}.
    """
    tokens = _parse(raw, where)
    if not len(tokens):
        raise JaxkvError(f"{where}: a request needs at least one token")
    return tokens


def seeded_tokens(seed: int, length: int) -> np.ndarray:
    """int32[length] that depends on the seed and the position alone.

    Multiplying by an odd number permutes the 31-bit integers, so two seeds differ at every position; the
    exclusive or with a second such product makes neighbouring positions unlike.
    """
    positions = np.arange(length, dtype=np.uint64)
    mixed = np.uint64(seed * 0x9E3779B1 % TOKEN_LIMIT) ^ (positions * np.uint64(0x85EBCA6B))
    return (mixed & np.uint64(TOKEN_LIMIT - 1)).astype(np.int32)


def _parse(raw: Any, where: str) -> np.ndarray:
    if isinstance(raw, list):
        return _listed(raw, where)
    fields = Fields(raw, where)
    if fields.has("seed"):
        seed = fields.integer("seed")
        if seed >= TOKEN_LIMIT:
            raise JaxkvError(f"{where}: 'seed' is {seed}; it must be below {TOKEN_LIMIT}")
        tokens = seeded_tokens(seed, _checked_length(fields.integer("len"), where))
    elif fields.has("range"):
        first, stop = _pair(fields, "range")
        if stop < first:
            raise JaxkvError(f"{where}: the range {first}..{stop} is backwards")
        _checked_length(stop - first, where)
        tokens = np.arange(first, stop, dtype=np.int32)
    elif fields.has("repeat"):
        token, count = _pair(fields, "repeat")
        tokens = np.repeat(_listed([token], where), _checked_length(count, where))
    elif fields.has("concat"):
        parts = [_parse(part, f"{where}.concat[{i}]") for i, part in enumerate(fields.items("concat"))]
        _checked_length(sum(map(len, parts)), where)
        tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
    else:
        raise JaxkvError(
            f"{where}: tokens are a list or an object with 'seed', 'range', 'repeat' or 'concat'"
        )
    fields.finish()
    return tokens


def _listed(raw: list[Any], where: str) -> np.ndarray:
    for token in raw:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < TOKEN_LIMIT:
            raise JaxkvError(f"{where}: {token!r} is no token id; ids are integers in [0, {TOKEN_LIMIT})")
    _checked_length(len(raw), where)
    return np.array(raw, dtype=np.int32)


def _pair(fields: Fields, key: str) -> tuple[int, int]:
    pair = fields.items(key)
    if len(pair) != 2 or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in pair):
        raise JaxkvError(f"{fields.where}: {key!r} must be two non-negative integers, not {pair!r}")
    if max(pair) > TOKEN_LIMIT:
        raise JaxkvError(f"{fields.where}: {key!r} is {pair!r}; token ids are below {TOKEN_LIMIT}")
    return pair[0], pair[1]


def _checked_length(length: int, where: str) -> int:
    if length > MAX_TOKENS:
        raise JaxkvError(f"{where}: {length} tokens; a scenario may have {MAX_TOKENS} in one sequence")
    return length
