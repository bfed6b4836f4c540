"""Loading a model from a GGUF file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.engine.loading.gguf_file import GGUFFile
from jaxkv.engine.loading.loaded_model import LoadedModel, choose_dtype, naming
from jaxkv.engine.tokenizer import Tokenizer, tokenizer_from_vocabulary
from jaxkv.errors import JaxkvError
from models.registry import family_of_gguf

# Tokens that end a turn, by name: the file only says which one ends a text.
END_OF_TURN_TOKENS = ("<end_of_turn>",)


def load_gguf(path: Path, name: str, dtype: str) -> LoadedModel:
    """Reads configuration, tokenizer and weights, dequantised, then rounded to `dtype` ("auto": bfloat16).

    JaxkvError names what is missing, of the wrong shape, unknown or truncated.
    """
    dtype = choose_dtype(dtype, "bfloat16")
    file = GGUFFile(path)
    metadata = file.metadata
    with naming(path):
        family = family_of_gguf(_required(metadata, "general.architecture", path))
        return LoadedModel.read(
            family,
            family.config_from_gguf(metadata),
            file,
            parameter_names=family.gguf_names,
            name=name,
            dtype=dtype,
            tokenizer=read_tokenizer(metadata, path),
            end_token_ids=_end_tokens(metadata),
        )


def _required(metadata: Mapping[str, Any], key: str, path: Path) -> Any:
    if key not in metadata:
        raise JaxkvError(f"{path} lacks the metadata {key}")
    return metadata[key]


def read_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer in a file's metadata; `path` is for messages. JaxkvError for what is missing or of
    another kind."""
    kind = _required(metadata, "tokenizer.ggml.model", path)
    if kind != "llama":
        raise JaxkvError(
            f"{path} has a tokenizer of the kind {kind!r}; only 'llama' (SentencePiece) is supported"
        )
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", True)
    return tokenizer_from_vocabulary(
        _required(metadata, "tokenizer.ggml.tokens", path),
        _required(metadata, "tokenizer.ggml.scores", path),
        _required(metadata, "tokenizer.ggml.token_type", path),
        bos_token_id=_required(metadata, "tokenizer.ggml.bos_token_id", path) if add_bos else None,
        unknown_token_id=metadata.get("tokenizer.ggml.unknown_token_id", 0),
        add_space_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True),
    )


def _end_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = {metadata[key] for key in keys if key in metadata}
    tokens = metadata["tokenizer.ggml.tokens"]
    ids.update(tokens.index(token) for token in END_OF_TURN_TOKENS if token in tokens)
    return tuple(sorted(ids))
