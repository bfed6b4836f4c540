"""Element types that keys and values are kept in, by vLLM's names, and the scales beside those of 8 bits.

A token's K and V of each head are quantised on their own: a float32 scale for each lies in the page with them
(vLLM's `fp8_per_token_head` and `int8_per_token_head`; its `fp8` has one scale for a whole layer instead).
"""

from dataclasses import replace

from jaxkv.errors import JaxkvError
from jaxkv.specs import AttentionSpec

KV_CACHE_DTYPES: dict[str, str] = {
    "bfloat16": "bfloat16",
    "float32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_per_token_head": "float8_e4m3fn",
    "int8": "int8",
    "int8_per_token_head": "int8",
}
"""The element type of each name; "auto" stands for the model's own."""

KV_SCALE_BYTES = 8
"""Of a token and head: one float32 for K, one for V."""

_QUANTISED = ("float8_e4m3fn", "int8")
_8_BITS = (*_QUANTISED, "float8_e5m2")


def choose_kv_cache_dtype(name: str, model_dtype: str) -> str:
    """The element type called `name`; for "auto" it is `model_dtype`.

    Raises JaxkvError for an unknown name, and for another than `model_dtype` where that is of 8 bits: it can
    only be meant for keys and values, too.
    """
    names = {"auto": model_dtype, **KV_CACHE_DTYPES}
    if not isinstance(name, str) or name not in names:
        raise JaxkvError(f"kv_cache_dtype must be one of {', '.join(names)}, not {name!r}")
    if model_dtype in _8_BITS and names[name] != model_dtype:
        raise JaxkvError(
            f"dtype {model_dtype} and kv_cache_dtype {name} both say what keys and values are in: give one"
        )
    return names[name]


def scale_bytes(dtype: str) -> int:
    """Bytes of the scales beside one token's K and V of one head."""
    return KV_SCALE_BYTES if dtype in _QUANTISED else 0


def kept_in[S: AttentionSpec](spec: S, dtype: str) -> S:
    """The same layer with its keys and values in `dtype`, and their scales."""
    return replace(spec, dtype=dtype, kv_quant_scale_bytes=scale_bytes(dtype))
