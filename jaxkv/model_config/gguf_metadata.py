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
            return _read(file, path)
        except (struct.error, EOFError, OverflowError, OSError):
            raise JaxkvError(f"{path}: the file breaks off within its metadata") from None
        except RecursionError:
            raise JaxkvError(f"{path}: an array of the metadata is nested too deep") from None
        except UnicodeDecodeError as error:
            raise JaxkvError(f"{path}: a string of the metadata is no UTF-8 text ({error.reason})") from None


def _read(file: BinaryIO, path: Path) -> dict[str, Any]:
    if file.read(4) != MAGIC:
        raise JaxkvError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
    version = _scalar(file, "<I")
    if version not in (2, 3):
        raise JaxkvError(f"{path}: GGUF version {version} is not one of 2 and 3 (little-endian)")
    _scalar(file, "<Q")  # number of tensors
    count = _scalar(file, "<Q")
    entries = {}
    for _ in range(count):
        key = _string(file)
        value_type = _scalar(file, "<I")
        value = _value(file, value_type, path)
        if value is not None:
            entries[key] = value
    return entries


def _value(file: BinaryIO, value_type: int, path: Path) -> Any:
    """One value; None for an array, which is skipped."""
    if value_type in _SCALARS:
        return _scalar(file, _SCALARS[value_type])
    if value_type == _STRING:
        return _string(file)
    if value_type != _ARRAY:
        raise JaxkvError(f"{path}: unknown type {value_type} of a metadata value")
    element_type, count = _scalar(file, "<I"), _scalar(file, "<Q")
    if element_type in _SCALARS:
        file.seek(struct.calcsize(_SCALARS[element_type]) * count, 1)
    else:
        for _ in range(count):
            if element_type == _STRING:
                file.seek(_scalar(file, "<Q"), 1)
            else:
                _value(file, element_type, path)
    return None


def _scalar(file: BinaryIO, layout: str) -> Any:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))[0]


def _string(file: BinaryIO) -> str:
    length = _scalar(file, "<Q")
    data = file.read(min(length, 1 << 20))
    if len(data) < length:
        raise EOFError
    return data.decode("utf-8")
