"""What a model's configuration says about its cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxkv.errors import JaxkvError
from jaxkv.model_config.families import family_of
from jaxkv.model_config.layer_patterns import CHUNKED, SLIDING, layer_kinds
from jaxkv.model_config.sources import find_config
from jaxkv.model_config.text_config import TextConfig
from jaxkv.specs import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

DEFAULT_DTYPE = "bfloat16"


@dataclass(frozen=True)
class ModelCache:
    """The layers of a model that keep something, before block size and dtype are chosen.

    kinds: one a layer; layer i is called "layers.{i}" as in the model itself.
    dtype: the config's own, None where it names none.
    max_model_len: the longest sequence that the model was made for, None where the config does not say.
    """

    name: str
    kinds: tuple[str, ...]
    num_kv_heads: int
    head_size: int
    sliding_window: int | None
    attention_chunk_size: int | None
    max_model_len: int | None
    dtype: str | None

    def cache_dtype(self, dtype: str = "auto") -> str:
        """The element type asked for; "auto" is the config's own, or bfloat16."""
        return (self.dtype or DEFAULT_DTYPE) if dtype == "auto" else dtype

    def specs(self, block_size: int, dtype: str = "auto") -> dict[str, KVCacheSpec]:
        """The layers' specs by name."""
        shape = {
            "block_size": block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "dtype": self.cache_dtype(dtype),
        }
        return {f"layers.{i}": self._spec(kind, shape) for i, kind in enumerate(self.kinds)}

    def _spec(self, kind: str, shape: dict[str, Any]) -> KVCacheSpec:
        if kind == SLIDING:
            return SlidingWindowSpec(**shape, sliding_window=self.sliding_window or 0)
        if kind == CHUNKED:
            return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=self.attention_chunk_size or 0)
        return FullAttentionSpec(**shape)


def read_model_cache(model: str) -> ModelCache:
    """Reads `model`: a config.json, a folder with one, a GGUF file, or "gemma3-270m". No weights are read."""
    source = find_config(model)
    return model_cache_from_config(source.config, source.name)


def model_cache_from_config(config: Mapping[str, Any], name: str = "model") -> ModelCache:
    """The cache that a config describes. Raises JaxkvError for an unknown architecture or missing keys."""
    family = family_of(config)
    text = TextConfig(config, family.defaults)
    kinds = tuple(layer_kinds(text, family.when_silent))
    num_heads = text.integer("num_attention_heads")
    head_size = text.optional_integer("head_dim")
    if head_size is None:
        hidden = text.integer("hidden_size")
        if hidden % num_heads:
            raise JaxkvError(f"hidden_size {hidden} is not a multiple of num_attention_heads {num_heads}")
        head_size = hidden // num_heads
    return ModelCache(
        name=name,
        kinds=kinds,
        num_kv_heads=text.optional_integer("num_key_value_heads") or num_heads,
        head_size=head_size,
        sliding_window=text.integer("sliding_window") if SLIDING in kinds else None,
        attention_chunk_size=text.integer("attention_chunk_size") if CHUNKED in kinds else None,
        max_model_len=text.optional_integer("max_position_embeddings", "max_seq_len", "n_positions"),
        dtype=_dtype(text),
    )


def _dtype(text: TextConfig) -> str | None:
    value = text.get("dtype") or text.get("torch_dtype")
    return value if value in ("float32", "bfloat16", "float16") else None
