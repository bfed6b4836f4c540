"""Import vLLM's scheduler-side Python files from an unpacked wheel, with nothing of its device side
installed.

The files that keep vLLM's cache accounts are plain Python, but importing them pulls in torch, serving code
and compiled extensions that they never call. Here those packages become *inert*: any attribute of an inert
module is an inert class, which accepts being called, subclassed, subscripted and used as a decorator. vLLM's
own files run unpatched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxkv.errors import JaxkvError

# Inert even where installed: a real one would only make the import slow, or drag in a device.
_ALWAYS_INERT = frozenset({"torch", "torchvision", "triton", "transformers", "vllm._C", "vllm._custom_ops"})
# Inert where not installed.
_INERT_IF_MISSING = frozenset(
    {
        "aiohttp", "blake3", "cachetools", "cbor2", "cloudpickle", "cpuinfo", "cv2", "depyf", "fastapi",
        "filelock", "gguf", "huggingface_hub", "llguidance", "mistral_common", "openai", "openai_harmony",
        "partial_json_parser", "PIL", "prometheus_client", "psutil", "pybase64", "regex", "requests",
        "safetensors", "setproctitle", "starlette", "tokenizers", "tqdm", "urllib3", "uvloop", "xgrammar",
        "yaml", "zmq",
    }
)  # fmt: skip
# Parts of vLLM that the accounts import and never use, and whose import needs a working torch.
_INERT_VLLM = frozenset(
    {
        "vllm.compilation",
        "vllm.config",
        "vllm.env_override",
        "vllm.forward_context",
        "vllm.model_executor",
        "vllm.utils.gpu_sync_debug",
    }
)
# Packages of vLLM whose `__init__` is inert, while the files below it are the real ones.
_HOLLOW_VLLM = frozenset({"vllm.distributed"})


class _InertType(type):
    """Metaclass of inert classes: every attribute exists and is inert; the usual type expressions work."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = _inert_class(name)
        setattr(cls, name, value)
        return value

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __contains__(cls, item: object) -> bool:
        return False


class _InertObject:
    """Base of inert classes. Called with one callable, an instance returns it: it was used as a decorator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _inert_class(name)

    def __str__(self) -> str:
        return "inert"

    def __radd__(self, other: object) -> object:
        return other

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> Any:
        from pydantic_core import core_schema  # pyright: ignore[reportMissingImports] (it comes with vLLM)

        return core_schema.any_schema()


def _inert_class(name: str) -> Any:
    return _InertType(name, (_InertObject,), {})


class _InertModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "0.0.0"
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = _inert_class(name)
        setattr(self, name, value)
        return value


class _InertFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of `inert` modules, and of all below them, with inert modules; of `hollow` ones,
    likewise, but what is below them is looked up in the folder of the same name under `tree`."""

    def __init__(self, tree: Path, inert: frozenset[str], hollow: frozenset[str]) -> None:
        self._tree = tree
        self._inert = inert
        self._hollow = hollow

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        parts = fullname.split(".")
        below_inert = any(".".join(parts[:i]) in self._inert for i in range(1, len(parts) + 1))
        if below_inert or fullname in self._hollow:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _InertModule(spec.name)
        module.__path__ = (
            [str(self._tree.joinpath(*spec.name.split(".")))] if spec.name in self._hollow else []
        )
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_vllm(tree: Path) -> str:
    """Make the vLLM files under `tree` (the folder that holds `vllm/`) importable; returns their version.

    Raises JaxkvError if `tree` holds no vLLM, or pydantic or msgspec, which vLLM's files do use, are missing.
    """
    if not (tree / "vllm" / "v1" / "core" / "kv_cache_manager.py").is_file():
        raise JaxkvError(
            f"--vllm {tree} holds no vllm/v1/core/kv_cache_manager.py: unpack vLLM's wheel there"
        )
    for needed in ("pydantic", "msgspec", "packaging"):
        if importlib.util.find_spec(needed) is None:
            raise JaxkvError(
                f"vLLM's files need the package {needed}: pip install pydantic msgspec packaging"
            )
    missing = frozenset(name for name in _INERT_IF_MISSING if importlib.util.find_spec(name) is None)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.meta_path.insert(0, _InertFinder(tree, _ALWAYS_INERT | missing | _INERT_VLLM, _HOLLOW_VLLM))
    sys.path.insert(0, str(tree))
    logging.getLogger("vllm").setLevel(logging.ERROR)

    from vllm._version import __version__  # pyright: ignore[reportMissingImports]
    from vllm.v1.core.single_type_kv_cache_manager import (  # pyright: ignore[reportMissingImports]
        register_all_kvcache_specs,
    )

    register_all_kvcache_specs(None)
    return __version__
