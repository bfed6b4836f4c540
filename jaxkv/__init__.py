"""jaxkv: one pool of pages for models whose layers remember in different ways.

The host side (specs, planning, `KVCacheManager`, scheduler) needs numpy alone; `LLM` and `SamplingParams`
load the engine, and with it jax, when they are first used.
"""

import importlib

from jaxkv.errors import JaxkvError

TYPE_CHECKING = False  # typing's own is not needed for it, and `jaxkv.cli` wants to be imported fast
if TYPE_CHECKING:
    from typing import Any

    from jaxkv.engine.llm import LLM as LLM
    from jaxkv.engine.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_ENGINE = {"LLM": "jaxkv.engine.llm", "SamplingParams": "jaxkv.engine.sampling_params"}

__all__ = ["LLM", "JaxkvError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> "Any":
    if name in _ENGINE:
        return getattr(importlib.import_module(_ENGINE[name]), name)
    raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")
