"""Published configurations give models of the sizes that the planner counts and the caches that it plans."""

from math import prod

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxkv.model_config.model_cache import model_cache_from_config
from jaxkv.model_config.parameters import count_parameters
from models.registry import FAMILIES
from tests.model_config.published import read

FAMILY_OF = {
    "gemma-3-270m": "gemma3",
    "gemma-3-27b": "gemma3",
    "jamba-v0.1": "jamba",
    "jamba-1.5-mini": "jamba",
    "jamba-1.5-large": "jamba",
    "jamba-reasoning-3b": "jamba",
    "lara-4-mini": "lara-mini",
    "lfm3-1.7b": "lfm3",
    "qwen3-next-80b-a3b": "qwen3-next",
}
# Parameters of more than one axis that the planner leaves out: convolutions, and gates of one row a head or
# a layer.
NOT_COUNTED = ("conv", "kernel", "attention.gate", "shared_gate")


@pytest.fixture(params=FAMILY_OF)
def published(request):
    """The family, its config, and config.json."""
    family = next(family for family in FAMILIES if family.name == FAMILY_OF[request.param])
    config_json = read(request.param)
    return family, family.config_from_hf(config_json), config_json


def test_matrices_have_the_parameters_that_the_planner_counts(published):
    family, config, config_json = published
    model = nnx.eval_shape(lambda: family.make_model(config, jnp.dtype("bfloat16")))
    counted = 0
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        name, shape = ".".join(map(str, path)), variable.get_value().shape
        if len(shape) > 1 and not name.endswith(NOT_COUNTED):
            counted += prod(shape)
    assert counted == count_parameters(model_cache_from_config(config_json)).total


@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")]
)
def test_layers_keep_what_the_planner_plans(published, dtypes):
    family, config, config_json = published
    dtype, state_dtype = dtypes
    planned = model_cache_from_config(config_json).specs(16, dtype, state_dtype=state_dtype)
    assert family.cache_specs(config, 16, dtype, state_dtype) == planned
