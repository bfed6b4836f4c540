"""What the prompts of a trace are made of, as far as the trace tells: ids of prefixes, or tokens.

Replay needs two things of a prompt: the hash of each hash block, and how much of it any earlier prompt had
in common with it. Content answers both without the tokens where the trace has none.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.errors import JaxkvError
from jaxkv.hashing import BlockHasher

_PLACE_BITS = 21
_OWN = 1 << 63
MAX_ID = 2 ** (63 - _PLACE_BITS) - 1
"""An id and the place of a block share 63 bits."""


class Run(NamedTuple):
    """`length` ids that follow each other: first, first + 1, ..."""

    first: int
    length: int


def runs_of(ids: Sequence[int]) -> tuple[Run, ...]:
    """The ids as runs. Traces number new blocks in turn, so that runs are few."""
    runs: list[Run] = []
    start = 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or ids[place] != ids[place - 1] + 1:
            runs.append(Run(ids[start], place - start))
            start = place
    return tuple(runs)


class SeenPrefixes:
    """Everything that has been computed in one replay, whatever has become of it since."""

    def __init__(self) -> None:
        self._keys: set[object] = set()

    def shared(self, keys: Sequence[object]) -> int:
        """How many leading keys are known. Keys stand for prefixes: after one that is new all are new."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self._keys:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, keys: Sequence[object]) -> None:
        self._keys.update(keys)


class HashCache:
    """The hashes that ids stand for, made once and shared by all prompts that have the id."""

    def __init__(self, hash_block_size: int) -> None:
        self.hash_block_size = hash_block_size
        self.of_id: dict[int, list[bytes]] = {}


class Content(ABC):
    """One prompt and its answer."""

    @abstractmethod
    def hashes(self, hasher: BlockHasher, cache: HashCache, serial: int, num_blocks: int) -> list[bytes]:
        """The hashes of the first `num_blocks` hash blocks, the answer's included.

        serial: number of the request; what the trace does not tell is taken to be its own.
        """

    @abstractmethod
    def keys(self, hasher: BlockHasher) -> Sequence[object]:
        """One key for every `unit(hasher)` tokens of the prompt: equal keys stand for equal prefixes."""

    @abstractmethod
    def unit(self, hasher: BlockHasher) -> int:
        """Tokens a key stands for."""


class PrefixIds(Content):
    """The prompt as ids of `block_size` tokens each; an id stands for the whole prefix up to its end.

    The last id may stand for a part of a block. Ids need not cover the prompt's end. Hash blocks that are
    smaller than the trace's are derived from the id they end in: sharing that is finer than the trace's block
    is lost, so hit rates are lower bounds.
    """

    __slots__ = ("block_size", "num_prompt_tokens", "runs")

    def __init__(self, block_size: int, num_prompt_tokens: int, runs: tuple[Run, ...]) -> None:
        self.block_size = block_size
        self.num_prompt_tokens = num_prompt_tokens
        self.runs = runs
        highest = max((run.first + run.length for run in runs), default=0)
        if highest > MAX_ID or any(run.first < 0 or run.length < 1 for run in runs):
            raise JaxkvError(f"ids of blocks must lie in [0, {MAX_ID}]")

    @property
    def num_ids(self) -> int:
        return sum(run.length for run in self.runs)

    def hashes(self, hasher: BlockHasher, cache: HashCache, serial: int, num_blocks: int) -> list[bytes]:
        size = hasher.hash_block_size
        told = min(self.num_ids * self.block_size, self.num_prompt_tokens) // size
        found: list[bytes] = []
        place = 0
        for run in self.runs:
            for block_id in range(run.first, run.first + run.length):
                derived = cache.of_id.get(block_id)
                if derived is None:
                    derived = cache.of_id[block_id] = self._derive(block_id, place, size)
                found += derived
                place += 1
        del found[min(told, num_blocks) :]
        if len(found) < num_blocks:
            found += _own_hashes(serial, len(found), num_blocks)
        return found

    def _derive(self, block_id: int, place: int, size: int) -> list[bytes]:
        """Hashes of the hash blocks that end in the id's block, which is number `place` of its prefix."""
        first, stop = place * self.block_size // size, (place + 1) * self.block_size // size
        return _as_hashes((block_id << _PLACE_BITS) + np.arange(first, stop, dtype=np.uint64))

    def keys(self, hasher: BlockHasher) -> Sequence[int]:
        if len(self.runs) == 1:
            return range(self.runs[0].first, self.runs[0].first + self.runs[0].length)
        return [block_id for run in self.runs for block_id in range(run.first, run.first + run.length)]

    def unit(self, hasher: BlockHasher) -> int:
        return self.block_size


class Lengths(PrefixIds):
    """A prompt of which only the length is known: it shares nothing."""

    __slots__ = ()

    def __init__(self, num_prompt_tokens: int) -> None:
        super().__init__(1, num_prompt_tokens, ())


class Tokens(Content):
    """A prompt whose tokens are known, int32[n], and its answer's, int32[m]."""

    cache_salt: str | None = None
    lora_name: str | None = None
    multimodal_inputs = ()

    def __init__(self, prompt: NDArray[np.int32], answer: NDArray[np.int32]) -> None:
        self.prompt = prompt
        self.answer = answer

    def token_ids(self, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        return np.concatenate([self.prompt, self.answer])[start:stop]

    def hashes(self, hasher: BlockHasher, cache: HashCache, serial: int, num_blocks: int) -> list[bytes]:
        told = min(num_blocks, hasher.num_hash_blocks(len(self.prompt) + len(self.answer)))
        found = hasher.hash_blocks(self, 0, told, None) if told else []
        return found + _own_hashes(serial, told, num_blocks)

    def keys(self, hasher: BlockHasher) -> Sequence[bytes]:
        full = hasher.num_hash_blocks(len(self.prompt))
        return hasher.hash_blocks(self, 0, full, None) if full else []

    def unit(self, hasher: BlockHasher) -> int:
        return hasher.hash_block_size


def _own_hashes(serial: int, start: int, stop: int) -> list[bytes]:
    """Hashes of blocks [start, stop) that no other request has."""
    if stop <= start:
        return []
    return _as_hashes(np.arange(start, stop, dtype=np.uint64) + np.uint64(_OWN + (serial << _PLACE_BITS)))


def _as_hashes(keys: NDArray[np.uint64]) -> list[bytes]:
    """Eight bytes each."""
    data = keys.astype("<u8").tobytes()
    return [data[i : i + 8] for i in range(0, len(data), 8)]
