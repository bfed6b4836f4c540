"""Compiling for a GPU that is not there: with JAX's CUDA plugin it works, without it the message says so."""

import importlib.util
from functools import partial

import jax
import pytest

from pallas_kernels.aot_gpu import compile_for_gpu, gpu_mesh
from pallas_kernels.gpu.write import write_kv_gpu
from pallas_kernels.settings import AttentionSettings
from tests.pallas_kernels.cases import make_step

HAS_PLUGIN = importlib.util.find_spec("jax_cuda13_plugin") is not None


def test_an_unknown_chip_is_refused_with_the_known_names():
    with pytest.raises(ValueError, match="unknown chip 'a100', known: h100, h200, b200"):
        gpu_mesh("a100")


@pytest.mark.skipif(HAS_PLUGIN, reason="the plugin is installed")
def test_without_the_plugin_the_message_names_it():
    with pytest.raises(RuntimeError, match="compiling for h100 needs JAX's CUDA plugin: pip install"):
        gpu_mesh("h100")


@pytest.mark.skipif(not HAS_PLUGIN, reason="needs JAX's CUDA plugin")
def test_a_write_is_in_place():
    step = make_step(seq_lens=[3], query_lens=[3], block_size=8, head_size=128)
    settings = AttentionSettings(layout=step.layout, layer_slot=0, layer_slots=step.layer_slots)
    arguments = jax.eval_shape(lambda: (step.pages, step.k, step.v, step.batch, step.table))
    write = partial(write_kv_gpu, settings=settings)
    built = compile_for_gpu(write, arguments, chip="h100", donate=0)
    memory = built.compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == step.pages.nbytes
    assert memory.temp_size_in_bytes < step.pages.nbytes
    assert all(kernel.spilled_bytes == 0 for kernel in built.kernels)
