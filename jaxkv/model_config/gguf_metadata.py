"""The metadata at the head of a GGUF file, read without the `gguf` package and without the tensors.

Format: github.com/ggml-org/ggml, docs/gguf.md (versions 2 and 3, little-endian). Arrays are skipped: the
tokenizer's are most of the metadata, and planning needs none. A file that breaks off after its metadata is
read all the same.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO

from jaxkv.errors import JaxkvError

MAGIC = b"GGUF"

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}

GGUF_ARCHITECTURES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The Hugging Face architecture of each `general.architecture`."""

_CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
}


def gguf_config(path: Path) -> dict[str, Any]:
    """The file's metadata under the keys of a Hugging Face config.json.

    Raises JaxkvError for a file that is no GGUF file, is cut off within its metadata, or holds a model of an
    unknown architecture.
    """
    metadata = read_gguf_metadata(path)
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise JaxkvError(
            f"{path}: unknown general.architecture {architecture!r}; known are "
            f"{', '.join(GGUF_ARCHITECTURES)}"
        )
    config: dict[str, Any] = {"architectures": [GGUF_ARCHITECTURES[architecture]]}
    for key, name in _CONFIG_KEYS.items():
        value = metadata.get(f"{architecture}.{key}")
        if value is not None:
            config[name] = value
    return config


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All scalar and string entries of the file's metadata."""
    with path.open("rb") as file:
        try:
            return _Reader(file, path).entries()
        except EOFError:
            raise JaxkvError(f"{path}: the file breaks off within its metadata") from None
        except RecursionError:
            raise JaxkvError(f"{path}: an array of the metadata is nested too deep") from None
        except UnicodeDecodeError as error:
            raise JaxkvError(f"{path}: a string of the metadata is no UTF-8 text ({error.reason})") from None


class _Reader:
    """Walks through the metadata. EOFError means that the file ends before it should."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._size = path.stat().st_size

    def entries(self) -> dict[str, Any]:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise JaxkvError(f"{self._path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
        version = self._scalar("<I")
        if version not in (2, 3):
            raise JaxkvError(f"{self._path}: GGUF version {version} is not one of 2 and 3 (little-endian)")
        self._scalar("<Q")  # number of tensors
        found = {}
        for _ in range(self._scalar("<Q")):
            key = self._string()
            value = self._value(self._scalar("<I"))
            if value is not None:
                found[key] = value
        return found

    def _value(self, value_type: int) -> Any:
        """One value; None for an array, which is skipped."""
        if value_type in _SCALARS:
            return self._scalar(_SCALARS[value_type])
        if value_type == _STRING:
            return self._string()
        if value_type != _ARRAY:
            raise JaxkvError(f"{self._path}: unknown type {value_type} of a metadata value")
        element_type, count = self._scalar("<I"), self._scalar("<Q")
        if element_type in _SCALARS:
            self._skip(struct.calcsize(_SCALARS[element_type]) * count)
            return None
        for _ in range(count):
            if element_type == _STRING:
                self._skip(self._scalar("<Q"))
            else:
                self._value(element_type)
        return None

    def _scalar(self, layout: str) -> Any:
        size = struct.calcsize(layout)
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError
        return struct.unpack(layout, data)[0]

    def _string(self) -> str:
        length = self._scalar("<Q")
        if length > self._size - self._file.tell():
            raise EOFError
        return self._file.read(length).decode("utf-8")

    def _skip(self, size: int) -> None:
        if size > self._size - self._file.tell():
            raise EOFError
        self._file.seek(size, 1)
