"""Reading the tensors of a GGUF file, dequantised to float32 by the `gguf` package."""

from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxkv.errors import JaxkvError
from jaxkv.gguf_header import GGUFHeader, TensorInfo


class GGUFTensor(NamedTuple):
    """One tensor of the file: its row-major shape, its format, and where its bytes are."""

    shape: tuple[int, ...]
    format: GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file. The header is read at once, tensors when asked for.

    metadata: every entry of the header; arrays of numbers are numpy arrays, arrays of strings lists.
    tensors: by name.

    Raises JaxkvError for a file that is missing, not GGUF, of another version, or breaks off.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def __init__(self, path: Path):
        self.path = path
        header = GGUFHeader.of_file(path)
        self._data = np.frombuffer(header.data, np.uint8)
        self.metadata = header.read_metadata()
        infos = header.read_tensors()
        start = header.data_start(self.metadata)
        self.tensors = {info.name: self._placed(info, start) for info in infos}

    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The row-major shape of a tensor; None where there is no such tensor."""
        tensor = self.tensors.get(name)
        return None if tensor is None else tensor.shape

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor in float32. JaxkvError for a format that cannot be dequantised."""
        tensor = self.tensors[name]
        block, block_bytes = GGML_QUANT_SIZES[tensor.format]
        rows = (*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
        stored = np.asarray(self._data[tensor.offset : tensor.offset + tensor.num_bytes]).reshape(rows)
        try:
            return dequantize(stored, tensor.format)
        except NotImplementedError:
            kind = tensor.format.name
            raise JaxkvError(f"tensor {name} of {self.path} has the unsupported format {kind}") from None

    def _placed(self, info: TensorInfo, start: int) -> GGUFTensor:
        try:
            kind = GGMLQuantizationType(info.type_number)
        except ValueError:
            raise JaxkvError(
                f"tensor {info.name} of {self.path} has the unknown format {info.type_number}"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not info.shape or info.shape[-1] % block:
            raise JaxkvError(
                f"tensor {info.name} of {self.path} has the shape {info.shape}; "
                f"rows of {kind.name} are whole blocks of {block} values"
            )
        tensor = GGUFTensor(info.shape, kind, start + info.offset, prod(info.shape) // block * block_bytes)
        end = tensor.offset + tensor.num_bytes
        if end > len(self._data):
            raise JaxkvError(
                f"{self.path} breaks off: tensor {info.name} ends at byte {end}, "
                f"the file has {len(self._data)}"
            )
        return tensor
