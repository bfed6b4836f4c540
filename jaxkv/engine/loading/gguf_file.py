"""Reading a GGUF file: metadata and tensors, dequantised to float32.

The header is parsed here because the `gguf` package's reader makes several numpy objects for every string of a
vocabulary (5 to 15 seconds for 262,144 tokens, against a quarter of a second) and reads past the end of a truncated
file; the formats of the tensors are the package's business. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxkv.errors import JaxkvError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# Formats of the scalar value types, by their number in the file; 8 is a string and 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GGUFTensor(NamedTuple):
    """One tensor of the file: its row-major shape, its format, and where its bytes are."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file. The header is read at once, tensors when asked for.

    metadata: every key of the header; arrays of numbers are numpy arrays, arrays of strings are lists.
    tensors: by name.

    Raises JaxkvError for a file that is missing, not GGUF, of another version, or truncated.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def __init__(self, path: Path):
        self.path = path
        try:
            self._data = np.memmap(path, mode="r")
        except FileNotFoundError:
            raise JaxkvError(f"there is no file {path}") from None
        except (OSError, ValueError) as error:
            raise JaxkvError(f"cannot read {path}: {error}") from None
        header = _Header(self._data, path)
        self.metadata = header.read_metadata()
        self.tensors = header.read_tensors(self.metadata)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The row-major shape of a tensor; None where there is no such tensor."""
        tensor = self.tensors.get(name)
        return None if tensor is None else tensor.shape

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor in float32. JaxkvError for a format that cannot be dequantised."""
        tensor = self.tensors[name]
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        rows = (*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
        stored = self._data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(rows)
        try:
            return dequantize(np.asarray(stored), tensor.type)
        except NotImplementedError:
            raise JaxkvError(
                f"tensor {name} of {self.path} has the unsupported format {tensor.type.name}"
            ) from None


class _Header:
    """A cursor over the header."""

    def __init__(self, data: np.ndarray, path: Path):
        self._bytes, self._path, self._at = memoryview(data), path, 0
        if len(self._bytes) < len(MAGIC) or self._bytes[: len(MAGIC)] != MAGIC:
            raise JaxkvError(
                f"{path} is not a GGUF file: it starts with {bytes(self._bytes[:4])!r}, not {MAGIC!r}"
            )
        self._at = len(MAGIC)
        version = self._scalar("I")
        if version not in SUPPORTED_VERSIONS:
            raise JaxkvError(f"{path} has GGUF version {version}; supported: {SUPPORTED_VERSIONS}")
        self._num_tensors, self._num_keys = self._scalar("Q"), self._scalar("Q")

    def read_metadata(self) -> dict[str, Any]:
        metadata = {}
        for _ in range(self._num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        return metadata

    def read_tensors(self, metadata: dict[str, Any]) -> dict[str, GGUFTensor]:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise JaxkvError(
                f"general.alignment in {self._path} must be a positive integer, not {alignment!r}"
            )
        infos = [self._tensor_info() for _ in range(self._num_tensors)]
        start = -(-self._at // alignment) * alignment
        tensors = {name: tensor._replace(offset=start + tensor.offset) for name, tensor in infos}
        for name, tensor in tensors.items():
            end = tensor.offset + tensor.num_bytes
            if end > len(self._bytes):
                raise JaxkvError(
                    f"{self._path} is truncated: tensor {name} ends at byte {end}, the file has {len(self._bytes)} bytes"
                )
        return tensors

    def _tensor_info(self) -> tuple[str, GGUFTensor]:
        name = self._string()
        num_dims = self._scalar("I")
        sizes = np.frombuffer(self._take(8 * num_dims), "<u8").tolist()
        number, offset = self._scalar("I"), self._scalar("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise JaxkvError(f"tensor {name} of {self._path} has the unknown format {number}") from None
        shape = tuple(reversed(sizes))
        block, block_bytes = GGML_QUANT_SIZES[kind]
        count = int(np.prod(shape, dtype=object)) if shape else 1
        if count % block or (shape and shape[-1] % block):
            raise JaxkvError(
                f"tensor {name} of {self._path} has rows of {shape[-1]} values; {kind.name} needs a multiple of {block}"
            )
        return name, GGUFTensor(shape, kind, offset, count // block * block_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, length = self._scalar("I"), self._scalar("Q")
            if item in _SCALARS:
                dtype = np.dtype("<" + _SCALARS[item])
                return np.frombuffer(self._take(length * dtype.itemsize), dtype)
            return [self._value(item) for _ in range(length)]
        if kind not in _SCALARS:
            raise JaxkvError(f"{self._path} has metadata of the unknown type {kind} before byte {self._at}")
        return self._scalar(_SCALARS[kind])

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        try:
            return str(self._take(self._scalar("Q")), "utf-8")
        except UnicodeDecodeError:
            raise JaxkvError(f"{self._path} has a string that is not UTF-8 before byte {self._at}") from None

    def _take(self, num_bytes: int) -> memoryview:
        end = self._at + num_bytes
        if end > len(self._bytes):
            raise JaxkvError(
                f"{self._path} is truncated: its header needs byte {end}, it has {len(self._bytes)} bytes"
            )
        taken = self._bytes[self._at : end]
        self._at = end
        return taken
