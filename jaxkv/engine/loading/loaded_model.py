"""What loading gives: a model ready to run, and all that an engine asks about it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxkv.engine.tokenizer import Tokenizer
from jaxkv.errors import JaxkvError
from jaxkv.kv_cache_dtype import choose_kv_cache_dtype, kept_in
from jaxkv.specs import AttentionSpec, KVCacheSpec, MambaSpec
from models.causal_lm import CausalLM
from models.checkpoint import NameMap, Tensors, build_model
from models.registry import ModelFamily

# Dtypes a model can be run in.
DTYPES = ("bfloat16", "float32")


def choose_dtype(wanted: str, stored: str) -> str:
    """`wanted`, or for "auto" the dtype the checkpoint was published in. JaxkvError for one that is not
    supported."""
    if wanted == "auto":
        return stored if stored in DTYPES else "bfloat16"
    if wanted not in DTYPES:
        raise JaxkvError(f"dtype must be auto, {' or '.join(DTYPES)}, not {wanted!r}")
    return wanted


@contextmanager
def naming(source: Path) -> Iterator[None]:
    """What a model's configuration or weights are refused for becomes a JaxkvError that names `source`."""
    try:
        yield
    except JaxkvError:
        raise
    except ValueError as error:
        raise JaxkvError(f"{source}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with its weights.

    name: what the user asked for, for messages.
    dtype: of weights and activations.
    state_dtype: of recurrent states that accumulate, where the checkpoint says; None: it does not.
    end_token_ids: generation stops at any of them.
    max_model_len: the longest sequence the model was made for.
    """

    name: str
    family: ModelFamily
    config: Any
    model: CausalLM
    dtype: str
    tokenizer: Tokenizer
    end_token_ids: tuple[int, ...]
    max_model_len: int
    state_dtype: str | None = None

    @classmethod
    def read(
        cls,
        family: ModelFamily,
        config: Any,
        tensors: Tensors,
        *,
        parameter_names: NameMap,
        name: str,
        dtype: str,
        tokenizer: Tokenizer,
        end_token_ids: tuple[int, ...],
        state_dtype: str | None = None,
    ) -> "LoadedModel":
        """Reads the weights. ValueError for one that is missing, of the wrong shape, or unknown."""
        model = build_model(lambda: family.make_model(config, jnp.dtype(dtype)), parameter_names, tensors)
        return cls(
            name=name,
            family=family,
            config=config,
            model=model,
            dtype=dtype,
            tokenizer=tokenizer,
            end_token_ids=end_token_ids,
            max_model_len=config.max_position_embeddings,
            state_dtype=state_dtype,
        )

    def cache_specs(
        self,
        block_size: int,
        dtype: str | None = None,
        *,
        kv_cache_dtype: str = "auto",
        state_dtype: str = "auto",
        enable_prefix_caching: bool = True,
        num_prefill_checkpoints: int = 0,
    ) -> dict[str, KVCacheSpec]:
        """What each layer keeps, by layer name; `dtype` of the cache is the model's unless given.

        kv_cache_dtype: of keys and values alone, by vLLM's names; "auto": `dtype`. JaxkvError for an unknown
        one.
        state_dtype: of recurrent states that accumulate; "auto": the checkpoint's, else that of the cache, as
        `jaxkv plan` and vLLM take it. JaxkvError for one in which no state can be kept.
        enable_prefix_caching: off, a recurrent layer keeps its running state and no others.
        num_prefill_checkpoints: states that it may leave inside one chunk of a prompt.
        """
        if dtype is None:
            dtype = self.dtype
        if state_dtype == "auto":
            state_dtype = self.state_dtype or dtype
        if state_dtype not in DTYPES:
            raise JaxkvError(f"state_dtype must be auto, {' or '.join(DTYPES)}, not {state_dtype!r}")
        kept_dtype = choose_kv_cache_dtype(kv_cache_dtype, dtype)
        specs = self.family.cache_specs(self.config, block_size, dtype, state_dtype)
        states = {
            "mamba_cache_mode": "align" if enable_prefix_caching else "none",
            "num_prefill_checkpoint_blocks": num_prefill_checkpoints if enable_prefix_caching else 0,
        }

        def kept(spec: KVCacheSpec) -> KVCacheSpec:
            if isinstance(spec, MambaSpec):
                return replace(spec, **states)
            return kept_in(spec, kept_dtype) if isinstance(spec, AttentionSpec) else spec

        return {name: kept(spec) for name, spec in specs.items()}
