"""The header of a GGUF file: its metadata and where its tensors are.

Read here, not with the `gguf` package, whose reader needs 5 to 15 seconds for the strings of a vocabulary of
262,144 tokens (this one half a second), reads past the end of a truncated file, and is not there where only
the core is installed. Format: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian.
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxkv.errors import JaxkvError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
# Formats of the scalar value types, by their number in the file.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
MAX_ARRAY_DEPTH = 8
DEFAULT_ALIGNMENT = 32


class TensorInfo(NamedTuple):
    """One tensor as the header describes it.

    shape: row-major. type_number: how its values are stored, as ggml numbers it. offset: from the start of
    the data.
    """

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int


class GGUFHeader:
    """A cursor over the header, read in order: first the metadata, then, where they are wanted, the tensors.

    Every method raises JaxkvError for a file that is not GGUF, of another version, broken off, or out of
    format.
    """

    def __init__(self, data: memoryview, path: Path):
        """`data` is the file's bytes (mapped: no more is touched than is read); `path` is for messages."""
        self._data, self._path, self._at = data, path, 0
        start = bytes(self._take(len(MAGIC))) if len(data) >= len(MAGIC) else bytes(data)
        if start != MAGIC:
            raise JaxkvError(f"{path} is not a GGUF file: it begins with {start!r}, not {MAGIC!r}")
        version = self._scalar("I")
        if version not in SUPPORTED_VERSIONS:
            raise JaxkvError(
                f"{path} has GGUF version {version}; supported: {SUPPORTED_VERSIONS}, little-endian"
            )
        self._num_tensors, self._num_keys = self._scalar("Q"), self._scalar("Q")

    @property
    def size(self) -> int:
        """Bytes read so far."""
        return self._at

    @classmethod
    def of_file(cls, path: Path) -> "GGUFHeader":
        """The header of the file at `path`, mapped into memory."""
        try:
            return cls(memoryview(np.memmap(path, mode="r")), path)
        except FileNotFoundError:
            raise JaxkvError(f"there is no file {path}") from None
        except JaxkvError:
            raise
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise JaxkvError(f"cannot read {path}: {error}") from None

    @property
    def data(self) -> memoryview:
        """The whole file."""
        return self._data

    def read_metadata(self) -> dict[str, Any]:
        """All entries. Arrays of numbers are numpy arrays, arrays of strings lists."""
        metadata = {}
        for _ in range(self._num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        return metadata

    def read_tensors(self) -> list[TensorInfo]:
        """All tensors, once the metadata is read."""
        return [self._tensor() for _ in range(self._num_tensors)]

    def data_start(self, metadata: Mapping[str, Any]) -> int:
        """Where the tensors' data begin, once the metadata and the tensors are read."""
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise JaxkvError(
                f"general.alignment in {self._path} must be a positive integer, not {alignment!r}"
            )
        return -(-self._at // alignment) * alignment

    def check_not_cut_off(self, metadata: Mapping[str, Any]) -> None:
        """Once the metadata is read: raises JaxkvError for a file that ends before its last tensor begins."""
        tensors = self.read_tensors()
        if tensors:
            last = max(tensors, key=lambda tensor: tensor.offset)
            begin = self.data_start(metadata) + last.offset
            if begin >= len(self._data):
                raise JaxkvError(
                    f"{self._path} breaks off: tensor {last.name} begins at byte {begin}, the file has "
                    f"{len(self._data)}"
                )

    def _tensor(self) -> TensorInfo:
        name = self._string()
        sizes = np.frombuffer(self._take(8 * self._scalar("I")), "<u8").tolist()
        return TensorInfo(name, tuple(reversed(sizes)), self._scalar("I"), self._scalar("Q"))

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise JaxkvError(f"{self._path} has metadata of the unknown type {kind} before byte {self._at}")
        if depth == MAX_ARRAY_DEPTH:
            raise JaxkvError(
                f"{self._path} has arrays nested too deep before byte {self._at}: over {depth} levels"
            )
        item, length = self._scalar("I"), self._scalar("Q")
        if item in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[item])
            return np.frombuffer(self._take(length * dtype.itemsize), dtype)
        return [self._value(item, depth + 1) for _ in range(length)]

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        try:
            return str(self._take(self._scalar("Q")), "utf-8")
        except UnicodeDecodeError:
            raise JaxkvError(f"{self._path} has a string that is no UTF-8 before byte {self._at}") from None

    def _take(self, num_bytes: int) -> memoryview:
        end = self._at + num_bytes
        if end > len(self._data):
            raise JaxkvError(
                f"{self._path} breaks off within its metadata: it has {len(self._data)} of {end} bytes"
            )
        taken = self._data[self._at : end]
        self._at = end
        return taken
