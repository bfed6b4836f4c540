"""Compiling for a TPU that is not there: `jax.experimental.topologies` needs libtpu, no device."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_ACCELERATOR_TYPES = {
    "v4": "v4-8",
    "v5e": "v5litepod-1",
    "v5p": "v5p-8",
    "v6e": "v6e-1",
    "tpu7x": "tpu7x-2",
}
TPU_TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:1x1",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:1x1",
    "tpu7x": "tpu7x:1x1x1",
}


@cache
def tpu_mesh(chip: str) -> Mesh:
    """A mesh of one described device of `chip`. Raises ValueError for an unknown chip."""
    if chip not in TPU_TOPOLOGIES:
        raise ValueError(f"unknown chip {chip!r}, known: {', '.join(TPU_TOPOLOGIES)}")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no device is held, so two may compile at once
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", _ACCELERATOR_TYPES[chip])
    described = topologies.get_topology_desc(TPU_TOPOLOGIES[chip], platform="tpu")
    return Mesh(described.devices[:1], ("device",))


@contextmanager
def no_compilation_cache() -> Iterator[None]:
    """JAX can write what is compiled for a described device to its persistent cache, but not read it back.

    JAX looks once, at the first compilation, whether the cache is in use; hence the resets.
    """
    was_enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
        compilation_cache.reset_cache()


def compile_for_tpu(
    function: Callable[..., Any], arguments: Sequence[Any], *, chip: str, donate: int | None = None
) -> jax.stages.Compiled:
    """`function` compiled for one device of `chip`, a key of `TPU_TOPOLOGIES`.

    `arguments` are pytrees of arrays or `jax.ShapeDtypeStruct`; `donate` is the index of a donated one.
    """
    mesh = tpu_mesh(chip)
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tuple(arguments)
    )
    jitted = jax.jit(function, donate_argnums=() if donate is None else (donate,))
    with jax.set_mesh(mesh), no_compilation_cache():
        return jitted.lower(*placed).compile()
