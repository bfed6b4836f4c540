"""Loading a model from a Hugging Face folder: config.json, safetensors, tokenizer.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.engine.loading.json_file import read_json
from jaxkv.engine.loading.loaded_model import LoadedModel, choose_dtype, naming
from jaxkv.engine.loading.safetensors_folder import SafetensorsFolder
from jaxkv.engine.tokenizer import Tokenizer, tokenizer_from_json
from jaxkv.errors import JaxkvError
from jaxkv.model_config.model_cache import stated_state_dtype
from jaxkv.model_config.text_config import TextConfig
from models.registry import ModelFamily, family_of


def load_huggingface(folder: Path, name: str, dtype: str) -> LoadedModel:
    """Reads a folder; `dtype` "auto" is the one config.json names.

    JaxkvError names what is missing, of the wrong shape, unknown or truncated.
    """
    config_json = read_json(folder / "config.json")
    dtype = choose_dtype(dtype, _stored_dtype(config_json))
    with naming(folder):
        family = _family(config_json)
        return LoadedModel.read(
            family,
            family.config_from_hf(config_json),
            SafetensorsFolder(folder, family.hf_text_prefixes),
            parameter_names=family.hf_names,
            name=name,
            dtype=dtype,
            tokenizer=_tokenizer(folder),
            end_token_ids=_end_tokens(folder, config_json),
            state_dtype=stated_state_dtype(TextConfig(config_json)),
        )


def _family(config_json: Mapping[str, Any]) -> ModelFamily:
    architectures = config_json.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ValueError(f"config.json must name one architecture, not {architectures!r}")
    return family_of(architectures[0])


def _stored_dtype(config_json: Mapping[str, Any]) -> str:
    text = config_json.get("text_config")
    for part in (config_json, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if part.get(key) is not None:
                return str(part[key])
    return "bfloat16"


def _tokenizer(folder: Path) -> Tokenizer:
    """The beginning token is the one tokenizer_config.json names; where it says nothing, "<bos>" if there is
    one."""
    settings_file = folder / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.is_file() else {}
    bos = settings.get("bos_token", "<bos>")
    if isinstance(bos, dict):  # an AddedToken written out
        bos = bos.get("content")
    if settings.get("add_bos_token") is False:
        bos = None
    return tokenizer_from_json(folder / "tokenizer.json", bos)


def _end_tokens(folder: Path, config_json: Mapping[str, Any]) -> tuple[int, ...]:
    """From generation_config.json, else config.json; one id or a list."""
    file = folder / "generation_config.json"
    sources = [read_json(file)] if file.is_file() else []
    text = config_json.get("text_config")
    sources += [dict(config_json), text if isinstance(text, dict) else {}]
    for source in sources:
        ids = source.get("eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise JaxkvError(f"eos_token_id of {folder} must be token ids, not {ids!r}")
        return tuple(sorted(set(ids)))
    raise JaxkvError(f"neither generation_config.json nor config.json of {folder} names an eos_token_id")
