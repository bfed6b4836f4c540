"""Every model family there is, found by the architecture's name in a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jaxkv.specs import KVCacheSpec
from models import (
    gemma3,
    gemma3_names,
    jamba,
    jamba_names,
    lara_mini,
    lara_mini_names,
    lfm3,
    lfm3_names,
    qwen3_next,
    qwen3_next_names,
)
from models.causal_lm import CausalLM
from models.checkpoint import NameMap
from models.gemma3_config import Gemma3Config
from models.jamba_config import JambaConfig
from models.lara_mini_config import LaraMiniConfig
from models.lfm3_config import Lfm3Config
from models.qwen3_next_config import Qwen3NextConfig


def _no_gguf(metadata: Mapping[str, Any]) -> Any:
    raise ValueError(f"GGUF files of {metadata.get('general.architecture')!r} cannot be read")


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """What it takes to read and run one kind of model.

    architectures: names under "architectures" in config.json.
    gguf_architectures: values of "general.architecture" in GGUF files; none: they are not read.
    config_from_hf, config_from_gguf: config.json or GGUF metadata to a config; ValueError where it is not
    right.
    make_model: a config and a dtype to a model, its weights zero.
    cache_specs: a config, a block size, the name of a dtype and that of states which accumulate to what each
    layer keeps, by layer name.
    hf_names, gguf_names: where the parameters are in a checkpoint.
    hf_text_prefixes: what may stand for "model." in checkpoints that hold more than the text model.
    """

    name: str
    architectures: tuple[str, ...]
    config_from_hf: Callable[[Mapping[str, Any]], Any]
    make_model: Callable[[Any, jnp.dtype], CausalLM]
    cache_specs: Callable[[Any, int, str, str], dict[str, KVCacheSpec]]
    hf_names: NameMap
    gguf_architectures: tuple[str, ...] = ()
    config_from_gguf: Callable[[Mapping[str, Any]], Any] = _no_gguf
    gguf_names: NameMap = field(default_factory=dict)
    hf_text_prefixes: tuple[str, ...] = ()


FAMILIES = (
    ModelFamily(
        name="gemma3",
        architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        gguf_architectures=("gemma3",),
        config_from_hf=Gemma3Config.from_hf,
        config_from_gguf=Gemma3Config.from_gguf,
        make_model=gemma3.Gemma3ForCausalLM,
        cache_specs=gemma3.cache_specs,
        hf_names=gemma3_names.HF_NAMES,
        gguf_names=gemma3_names.GGUF_NAMES,
        hf_text_prefixes=gemma3_names.HF_TEXT_PREFIXES,
    ),
    ModelFamily(
        name="jamba",
        architectures=("JambaForCausalLM",),
        config_from_hf=JambaConfig.from_hf,
        make_model=jamba.JambaForCausalLM,
        cache_specs=jamba.cache_specs,
        hf_names=jamba_names.HF_NAMES,
    ),
    ModelFamily(
        name="qwen3-next",
        architectures=("Qwen3NextForCausalLM",),
        config_from_hf=Qwen3NextConfig.from_hf,
        make_model=qwen3_next.Qwen3NextForCausalLM,
        cache_specs=qwen3_next.cache_specs,
        hf_names=qwen3_next_names.HF_NAMES,
    ),
    ModelFamily(
        name="lfm3",
        architectures=("Lfm3ForCausalLM",),
        config_from_hf=Lfm3Config.from_hf,
        make_model=lfm3.Lfm3ForCausalLM,
        cache_specs=lfm3.cache_specs,
        hf_names=lfm3_names.HF_NAMES,
    ),
    ModelFamily(
        name="lara-mini",
        architectures=("LaraMiniForCausalLM",),
        config_from_hf=LaraMiniConfig.from_hf,
        make_model=lara_mini.LaraMiniForCausalLM,
        cache_specs=lara_mini.cache_specs,
        hf_names=lara_mini_names.HF_NAMES,
    ),
)


def family_of(architecture: str) -> ModelFamily:
    """The family of an architecture of config.json; ValueError that names it and the known ones."""
    return _find(architecture, {name: family for family in FAMILIES for name in family.architectures})


def family_of_gguf(architecture: str) -> ModelFamily:
    """The family of a GGUF file's "general.architecture"; ValueError that names it and the known ones."""
    return _find(architecture, {name: family for family in FAMILIES for name in family.gguf_architectures})


def _find(architecture: str, known: Mapping[str, ModelFamily]) -> ModelFamily:
    try:
        return known[architecture]
    except KeyError:
        raise ValueError(f"unknown architecture {architecture!r}; known: {', '.join(known)}") from None
