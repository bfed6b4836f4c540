"""Where compiled steps are kept, so that the second start of an engine compiles nothing."""

import os

import jax

from jaxkv.engine.loading.packaged import cache_directory

_SHORTEST_SECONDS = 0.5


def use_compilation_cache(directory: str | os.PathLike[str] | None = None) -> None:
    """Turns on JAX's persistent compilation cache in `directory` (None: `compiled` in jaxkv's cache
    directory).

    A directory that the program already gave JAX stays, unless another is named here.
    """
    if directory is None and jax.config.jax_compilation_cache_dir:
        return
    jax.config.update("jax_compilation_cache_dir", os.fspath(directory or cache_directory() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _SHORTEST_SECONDS)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
