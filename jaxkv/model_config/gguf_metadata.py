"""What a GGUF file says about its model, under the names of a Hugging Face config.json.

Only the metadata at the head of the file is read: a file that breaks off after it will do.
"""

from pathlib import Path
from typing import Any

from jaxkv.errors import JaxkvError
from jaxkv.gguf_header import GGUFHeader

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


def gguf_config(path: Path, *, is_first_part: bool = False) -> dict[str, Any]:
    """The file's metadata under the keys of a Hugging Face config.json.

    is_first_part: the rest of the file lies in other files. Raises JaxkvError for a file that is no GGUF
    file, is cut off, or holds a model of an unknown architecture.
    """
    metadata = read_gguf_metadata(path, is_first_part=is_first_part)
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


def read_gguf_metadata(path: Path, *, is_first_part: bool = False) -> dict[str, Any]:
    """All entries of the metadata; JaxkvError for a file that is no GGUF file or breaks off."""
    header = GGUFHeader.of_file(path)
    metadata = header.read_metadata()
    if not is_first_part:
        header.check_not_cut_off(metadata)
    return metadata
