"""Compiling for a chip that is not there, beside JAX's persistent compilation cache."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from pallas_kernels.aot import compile_for_tpu


@pytest.fixture
def cache_everything(tmp_path) -> Iterator[None]:
    before = {
        name: getattr(jax.config, name)
        for name in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    }
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("cache_everything")
def test_the_same_function_compiles_twice_with_the_persistent_cache_on(tmp_path):
    """A program kept for a described device cannot be loaded again, so none may be kept."""
    argument = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    for _ in range(2):
        compiled = compile_for_tpu(lambda x: x + 1, [argument], chip="v5e")
        costs = compiled.cost_analysis()
        assert costs is not None
        assert costs["flops"] > 0
    assert not list(tmp_path.iterdir())
    # The cache is on again afterwards.
    jax.jit(lambda x: x + 2).lower(argument).compile()
    assert list(tmp_path.iterdir())
