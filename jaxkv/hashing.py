"""Chained hashes of prefixes: the hash of a hash block stands for all tokens from the start up to its end.

Two prefixes share cached blocks only where their hashes agree, so everything a block's content depends on
goes in: the tokens, and the extra keys (cache salt, LoRA adapter, multimodal content). The hashes are the
same in every process and on every machine:

    root     = SHA-256("jaxkv prefix hash 1"), or H(root, encoded salt and adapter) where a request has any
    hash[i]  = H(hash[i - 1], tokens of block i as little-endian int32 [, encoded multimodal keys of block i])

With `num_lookahead_tokens` k, block i's tokens are followed by the k tokens after it. A draft model reads
that far ahead, so a hit then also proves what its last cache entries depend on.
"""

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from jaxkv.checks import check_int
from jaxkv.errors import JaxkvError

ROOT = hashlib.sha256(b"jaxkv prefix hash 1").digest()
"""The parent of the first block of a request without salt and adapter."""

_LITTLE_ENDIAN = np.dtype("<i4")


class MultimodalSpan(Protocol):
    """Prompt tokens [offset, offset + length) stand for the content `identifier`."""

    @property
    def identifier(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...


class Hashable(Protocol):
    """What a hash is made from."""

    cache_salt: str | None
    lora_name: str | None

    @property
    def multimodal_inputs(self) -> Sequence[MultimodalSpan]: ...
    def token_ids(self, start: int = 0, stop: int | None = None) -> NDArray[np.int32]: ...


def encode_keys(keys: Iterable[tuple[str, str]]) -> bytes:
    """Key-value pairs as bytes that no other list of pairs encodes to: every string carries its length."""
    parts = []
    for name, value in keys:
        for text in (name, value):
            raw = text.encode()
            parts.append(struct.pack("<Q", len(raw)))
            parts.append(raw)
    return b"".join(parts)


class BlockHasher(ABC):
    """Hashes hash blocks of `hash_block_size` tokens, each chained to the one before it."""

    name: str

    def __init__(self, hash_block_size: int, num_lookahead_tokens: int = 0) -> None:
        check_int("hash_block_size", hash_block_size, 1)
        check_int("num_lookahead_tokens", num_lookahead_tokens, 0)
        self.hash_block_size = hash_block_size
        self.num_lookahead_tokens = num_lookahead_tokens

    def num_hash_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` known tokens are enough to hash."""
        return max(0, num_tokens - self.num_lookahead_tokens) // self.hash_block_size

    def hash_blocks(self, request: Hashable, start: int, stop: int, parent: bytes | None) -> list[bytes]:
        """Hashes of blocks [start, stop); `parent` is the hash of block start - 1 (None where start is 0)."""
        if parent is None:
            parent = self._root(request)
        size = self.hash_block_size
        tokens = request.token_ids(start * size, stop * size + self.num_lookahead_tokens)
        extra = self._extra_keys(request.multimodal_inputs, start, stop)
        return self._chain(parent, tokens.astype(_LITTLE_ENDIAN, copy=False), start, stop, extra)

    def _root(self, request: Hashable) -> bytes:
        """The parent of the first block: salt and adapter separate all that follows."""
        keys = [("salt", request.cache_salt), ("lora", request.lora_name)]
        present = [(name, value) for name, value in keys if value is not None]
        return hashlib.sha256(ROOT + encode_keys(present)).digest() if present else ROOT

    def _extra_keys(self, spans: Sequence[MultimodalSpan], start: int, stop: int) -> dict[int, bytes]:
        """Encoded multimodal keys of the blocks from `start` that any span touches, by block - start."""
        if not spans:
            return {}
        size, reach = self.hash_block_size, self.hash_block_size + self.num_lookahead_tokens
        touching: dict[int, list[tuple[str, str]]] = {}
        for span in spans:
            first = max(start, (span.offset - reach) // size + 1)
            last = min(stop - 1, (span.offset + span.length - 1) // size)
            for block in range(first, last + 1):
                # The offset within the block: the same image one token later is another content.
                key = ("multimodal", f"{span.offset - block * size}:{span.identifier}")
                touching.setdefault(block - start, []).append(key)
        return {block: encode_keys(keys) for block, keys in touching.items()}

    @abstractmethod
    def _chain(
        self, parent: bytes, tokens: NDArray[np.int32], start: int, stop: int, extra: dict[int, bytes]
    ) -> list[bytes]:
        """Hashes of blocks [start, stop), whose tokens and the look-ahead after them are `tokens`."""


class Sha256Hasher(BlockHasher):
    """Cryptographic, the default: nobody can make two prompts that share a block by mistake or on purpose."""

    name = "sha256"

    def _chain(
        self, parent: bytes, tokens: NDArray[np.int32], start: int, stop: int, extra: dict[int, bytes]
    ) -> list[bytes]:
        data = tokens.tobytes()
        stride = 4 * self.hash_block_size
        length = stride + 4 * self.num_lookahead_tokens
        sha256 = hashlib.sha256
        hashes = []
        if not extra:
            for begin in range(0, (stop - start) * stride, stride):
                parent = sha256(parent + data[begin : begin + length]).digest()
                hashes.append(parent)
            return hashes
        for block in range(stop - start):
            message = parent + data[block * stride : block * stride + length] + extra.get(block, b"")
            parent = sha256(message).digest()
            hashes.append(parent)
        return hashes


_TOKEN_FACTORS = np.array([0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93], np.uint64)
_PLACE_FACTORS = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)
_DIGEST_BYTES = 16


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), element by element."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Mix128Hasher(BlockHasher):
    """Fast and not cryptographic: 128 bits, all blocks at once. To be asked for by name.

    A hash is two sums modulo 2^64 over all tokens so far, each token mixed with its position. Chance
    collisions are as rare as 128 bits make them, but somebody who picks tokens on purpose can find one: do
    not use it where tenants must not see each other's cache.
    """

    name = "mix128"

    def _chain(
        self, parent: bytes, tokens: NDArray[np.int32], start: int, stop: int, extra: dict[int, bytes]
    ) -> list[bytes]:
        size, num_blocks = self.hash_block_size, stop - start
        begins = np.arange(num_blocks) * size
        places = np.arange(start * size + 1, start * size + 1 + len(tokens), dtype=np.uint64)
        wide = tokens.astype(np.uint64)
        sums = np.empty((num_blocks, 2), np.uint64)
        for lane in range(2):
            running = np.zeros(len(tokens) + 1, np.uint64)
            np.cumsum(_mix(wide * _TOKEN_FACTORS[lane] + places * _PLACE_FACTORS[lane]), out=running[1:])
            sums[:, lane] = running[begins + size + self.num_lookahead_tokens] - running[begins]
        for block, keys in extra.items():
            sums[block] += _digest_words(keys + struct.pack("<Q", start + block))
        sums[0] += np.frombuffer(parent[:_DIGEST_BYTES], "<u8").astype(np.uint64)
        data = np.cumsum(sums, axis=0).astype("<u8").tobytes()
        return [data[i : i + _DIGEST_BYTES] for i in range(0, len(data), _DIGEST_BYTES)]


def _digest_words(data: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(hashlib.sha256(data).digest()[:_DIGEST_BYTES], "<u8").astype(np.uint64)


HASHERS: dict[str, type[BlockHasher]] = {hasher.name: hasher for hasher in (Sha256Hasher, Mix128Hasher)}
"""The hashes that can be asked for, by name."""


def make_hasher(name: str, hash_block_size: int, num_lookahead_tokens: int = 0) -> BlockHasher:
    """A hasher by its name in `HASHERS`; JaxkvError names the known ones."""
    if not isinstance(name, str) or name not in HASHERS:
        raise JaxkvError(f"unknown prefix caching hash {name!r}; known are {', '.join(HASHERS)}")
    return HASHERS[name](hash_block_size, num_lookahead_tokens)
