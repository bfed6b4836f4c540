"""The one entrance: a path or a name to a model."""

import os
from pathlib import Path

from jaxkv.engine.loading.gguf_model import load_gguf
from jaxkv.engine.loading.huggingface import load_huggingface
from jaxkv.engine.loading.loaded_model import LoadedModel
from jaxkv.engine.loading.packaged import PACKAGED_MODELS
from jaxkv.errors import JaxkvError


def load_model(source: str | os.PathLike[str], dtype: str = "auto") -> LoadedModel:
    """Loads a GGUF file, a Hugging Face folder (config.json, safetensors, tokenizer.json), or a packaged
    model by name.

    dtype: "bfloat16", "float32", or "auto" for the one the checkpoint was published in. Raises JaxkvError,
    before much is read, for what is missing, truncated, of the wrong shape or of an unknown architecture.
    """
    known = ", ".join(PACKAGED_MODELS)
    if not isinstance(source, str | os.PathLike) or not isinstance(name := os.fspath(source), str):
        raise JaxkvError(f"a model must be a path or one of {known}, not {source!r}")
    if not name:
        raise JaxkvError(f"the model's name is empty: give a GGUF file, a folder, or one of {known}")
    path = Path(name)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise JaxkvError(f"there is no model {name!r}: {error.strerror}") from None
    if is_folder:
        return load_huggingface(path, name, dtype)
    if is_file:
        return load_gguf(path, name, dtype)
    if name in PACKAGED_MODELS:
        return load_gguf(PACKAGED_MODELS[name](), name, dtype)
    raise JaxkvError(f"there is no model {name!r}: neither a GGUF file, nor a folder, nor one of {known}")
