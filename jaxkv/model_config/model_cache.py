"""What a model's configuration says about its cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxkv.errors import JaxkvError
from jaxkv.kv_cache_dtype import choose_kv_cache_dtype
from jaxkv.model_config.families import family_of
from jaxkv.model_config.layer_caches import AttentionCache, CacheChoices, LatentCache, LayerCache
from jaxkv.model_config.sources import find_config
from jaxkv.model_config.text_config import TextConfig
from jaxkv.specs import KVCacheSpec, check_int

DEFAULT_DTYPE = "bfloat16"

DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
"""Short names of element types."""

_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that a config may name for the weights, and that recurrent states are kept in."""

CACHE_DTYPES = (*_DTYPES, "float8_e4m3fn", "float8_e5m2", "int8")
"""Dtypes that keys and values may be planned in."""

STATE_DTYPE_KEYS = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")


def cache_dtype_named(name: str) -> str:
    """The dtype of keys and values that `name` is short for; JaxkvError where it is none."""
    return _dtype_named(name, CACHE_DTYPES, "keys and values")


def state_dtype_named(name: str) -> str:
    """The dtype of recurrent states that `name` is short for; JaxkvError where it is none."""
    return _dtype_named(name, _DTYPES, "recurrent states")


def _dtype_named(name: str, known: tuple[str, ...], what: str) -> str:
    full = DTYPE_NAMES.get(name, name)
    if full not in known:
        raise JaxkvError(f"unknown dtype {name!r} of {what}; known are {', '.join(known)}")
    return full


@dataclass(frozen=True)
class ModelCache:
    """What the layers of a model keep, before block size, dtype and tensor parallelism are chosen.

    layers: the caches of each layer, in the model's order: none, one, or several.
    max_model_len: the longest sequence that the model was made for, None where the config does not say.
    dtype: the config's own, None where it names none.
    state_dtype: of recurrent states where it is not the model's dtype.
    text: the config's keys, None where the layers were given one by one.
    """

    name: str
    layers: tuple[tuple[LayerCache, ...], ...]
    max_model_len: int | None
    dtype: str | None
    state_dtype: str | None = None
    text: TextConfig | None = None

    @cached_property
    def caches(self) -> dict[str, LayerCache]:
        """The caches by name: "layers.3", or "layers.3.attention" and so on where layer 3 has several."""
        found: dict[str, LayerCache] = {}
        for index, caches in enumerate(self.layers):
            for cache in caches:
                found[f"layers.{index}" + (f".{cache.part}" if len(caches) > 1 else "")] = cache
        return found

    @property
    def model_dtype(self) -> str:
        """The config's element type, or bfloat16."""
        return self.dtype or DEFAULT_DTYPE

    def cache_dtype(self, dtype: str = "auto") -> str:
        """The element type of keys and values that is asked for; "auto" is the config's own."""
        return self.model_dtype if dtype == "auto" else cache_dtype_named(dtype)

    def specs(
        self,
        block_size: int,
        dtype: str = "auto",
        *,
        kv_cache_dtype: str = "auto",
        state_dtype: str = "auto",
        tensor_parallel: int = 1,
    ) -> dict[str, KVCacheSpec]:
        """The caches' specs by name, on one chip.

        dtype: of keys and values; a convolution's inputs are of the same where a model can be run in it.
        kv_cache_dtype: of keys and values alone, by vLLM's names; "auto": `dtype`.
        state_dtype: of recurrent states that accumulate; "auto": what vLLM takes for the family, or the
        config's own.
        Raises JaxkvError for an unknown dtype and where `tensor_parallel` chips cannot share the heads.
        """
        check_int("tensor_parallel", tensor_parallel, 1)
        dtype = self.cache_dtype(dtype)
        model_dtype = dtype if dtype in _DTYPES else self.model_dtype
        if state_dtype == "auto":
            state_dtype = self.state_dtype or model_dtype
        choices = CacheChoices(
            block_size=block_size,
            dtype=choose_kv_cache_dtype(kv_cache_dtype, dtype),
            conv_dtype=model_dtype,
            state_dtype=state_dtype_named(state_dtype),
            tensor_parallel=tensor_parallel,
        )
        return {name: cache.spec(choices) for name, cache in self.caches.items()}

    def replication(self, tensor_parallel: int) -> tuple[str, ...]:
        """What every chip holds a copy of, one sentence each."""
        heads = {c.num_kv_heads for c in self.caches.values() if isinstance(c, AttentionCache)}
        notes = [
            f"{count} KV heads on {tensor_parallel} chips: each is replicated on {tensor_parallel // count}"
            for count in sorted(heads)
            if count < tensor_parallel
        ]
        if tensor_parallel > 1 and any(isinstance(c, LatentCache) for c in self.caches.values()):
            notes.append(
                f"the latent cache has no heads to divide: replicated on all {tensor_parallel} chips"
            )
        return tuple(notes)


def read_model_cache(model: str) -> ModelCache:
    """Reads `model`: a config.json, a folder with one, a GGUF file, or "gemma3-270m". No weights are read."""
    source = find_config(model)
    return model_cache_from_config(source.config, source.name)


def model_cache_from_config(config: Mapping[str, Any], name: str = "model") -> ModelCache:
    """The cache that a config describes.

    Raises JaxkvError for an unknown architecture, missing keys and keys that contradict each other.
    """
    family = family_of(config)
    text = TextConfig(config, family.defaults)
    layers = tuple(tuple(caches) for caches in family.layers(text))
    return ModelCache(
        name=name,
        layers=layers,
        max_model_len=text.optional_integer(
            "max_position_embeddings", "model_max_length", "max_seq_len", "n_positions"
        ),
        dtype=_dtype(text),
        state_dtype=stated_state_dtype(text) or family.state_dtype,
        text=text,
    )


def stated_state_dtype(text: TextConfig) -> str | None:
    """The dtype of recurrent states that the config names; None where it names none, or leaves it open.
    JaxkvError for what is no name.
    """
    key = next((key for key in STATE_DTYPE_KEYS if text.get(key)), None)
    stated = None if key is None else text.get(key)
    if stated is not None and not isinstance(stated, str):
        raise JaxkvError(f"the config's {key} must be the name of a dtype, not {stated!r}")
    return None if stated == "auto" else stated


def _dtype(text: TextConfig) -> str | None:
    """The dtype of the weights; None where the config leaves it open. JaxkvError for one it cannot have."""
    value = text.get("dtype") or text.get("torch_dtype")
    if value in (None, "auto"):
        return None
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in _DTYPES:
        raise JaxkvError(f"the config's dtype {value!r} is none of {', '.join(_DTYPES)}")
    return name
